"""``python -m recfx`` as a process: pipes, signals, and who writes where."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recfx.commandline.main import main
from tests.support.forked_script import run_module

REPOSITORY = Path(__file__).parents[2]
EXPLAIN = ["explain", "tests.inspect.models:only_model"]

LOUD = """\
import os, subprocess, sys
from tests.inspect.models import towers

def make():
    print("printed")
    os.write(1, b"written\\n")
    subprocess.run([sys.executable, "-c", "print('by another process')"])
    return towers()

def interrupted():
    import signal
    signal.raise_signal(signal.SIGINT)
"""


@pytest.fixture
def loud(tmp_path: Path) -> Path:
    path = tmp_path / "loud.py"
    path.write_text(LOUD)
    return path


def test_stdout_has_the_result_alone_and_the_status_says_refused(loud: Path) -> None:
    done = run_module("recfx", "explain", f"{loud}:make", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["ok"] is False
    for text in ("printed", "written", "by another process"):
        assert text in done.stderr.splitlines()


def test_a_reader_that_leaves() -> None:
    """A new interpreter, because it is its last flush that complains."""
    command = [sys.executable, "-m", "recfx", "explain", "tests.inspect.models:many_tables", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()  # before anything is printed
        _, told = process.communicate(timeout=120)
    assert process.returncode == 141
    assert "Broken" not in told


def test_ctrl_c(loud: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{loud}:interrupted"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_the_shell_has_closed(
    stream: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Python starts then."""
    monkeypatch.setattr(sys, stream, None)
    assert main(EXPLAIN) == 0
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert printed.out.startswith("1 collection: 1 convertible. OK\n") is (stream == "stderr")
