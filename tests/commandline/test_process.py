"""``python -m recfx`` as a process: pipes, signals, and who writes where."""

from __future__ import annotations

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


CTRL_C = "os.kill(os.getpid(), signal.SIGINT)"
MOMENTS = {
    "importing": (
        f"class Finder:\n def find_spec(name, *_):\n  if name == 'recfx.commandline': {CTRL_C}\n"
        "sys.meta_path.insert(0, Finder)",
        130,
    ),
    "waiting": (
        f"def wait(): main.join(); time.sleep(0.1); {CTRL_C}; time.sleep(9)\nthreading.Thread(target=wait).start()",
        130,
    ),
    "at the end": (f"atexit.register(lambda: {CTRL_C})", 0),
}


@pytest.mark.parametrize(("code", "status"), MOMENTS.values(), ids=list(MOMENTS))
def test_ctrl_c_before_and_after(code: str, status: int) -> None:
    """While Python starts, while it waits for threads, and when all is done: in a new interpreter."""
    script = (
        "import atexit, os, recfx, runpy, signal, sys, threading, time\nmain = threading.main_thread()\n"
        f"{code}\nsys.argv[1:] = ['--version']\nrunpy.run_module('recfx', run_name='__main__', alter_sys=True)"
    )
    command, environment = [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (status, "")


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


def test_a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full:  # closing it flushes what is left, as the interpreter does in the end
        monkeypatch.setattr(sys, "stdout", full)
        assert main(EXPLAIN) == 1
    told = capsys.readouterr().err
    assert told.splitlines()[-1] == "python -m recfx explain: the output cannot be written: No space left on device"
