"""``python -m recfx`` as a process: pipes, signals, and who writes where."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.forked_script import run_module

REPOSITORY = Path(__file__).parents[2]

LOUD = """\
import os, subprocess, sys
from tests.inspect.models import towers

def make():
    print("printed")
    os.write(1, b"written\\n")
    subprocess.run([sys.executable, "-c", "print('by another process')"])
    return towers()

def waits():
    import signal, threading, time
    print("waiting", flush=True)
    time.sleep(60)
"""


def start(*arguments: str, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "recfx", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        **more,
    )


def test_stdout_has_the_result_alone_and_the_status_says_refused(tmp_path: Path) -> None:
    path = tmp_path / "loud.py"
    path.write_text(LOUD)
    done = run_module("recfx", "explain", f"{path}:make", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["ok"] is False
    for text in ("printed", "written", "by another process"):
        assert text in done.stderr.splitlines()


def test_a_reader_that_leaves_and_ctrl_c(tmp_path: Path) -> None:
    """Both at once, because each of them has to import torch."""
    path = tmp_path / "loud.py"
    path.write_text(LOUD)
    left = start("explain", "tests.inspect.models:many_tables", "--json")
    interrupted = start("explain", f"{path}:waits")
    assert left.stdout is not None
    left.stdout.close()  # before anything is printed
    assert interrupted.stderr is not None
    while "waiting" not in (line := interrupted.stderr.readline()):
        assert line, "it has ended"
    interrupted.send_signal(signal.SIGINT)
    assert left.wait(timeout=120) == 141
    assert left.stderr is not None
    assert "Broken" not in left.stderr.read()
    assert interrupted.wait(timeout=120) == 130
    assert "Traceback" not in interrupted.stderr.read()


def test_streams_that_the_shell_has_closed(tmp_path: Path) -> None:
    command = f"{sys.executable} -m recfx explain tests.inspect.models:only_model"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    started = {
        redirected: subprocess.Popen(
            ["sh", "-c", f"{command} {redirected}"],
            cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for redirected in (">&-", "2>&-", ">/dev/full")
    }  # fmt: skip
    ended = {name: (*process.communicate(timeout=120), process.returncode) for name, process in started.items()}
    assert ended[">&-"][2] == 0
    assert ended["2>&-"][0].startswith("1 collection: 1 convertible. OK\n")
    assert ended["2>&-"][2] == 0
    _, told, status = ended[">/dev/full"]
    assert status == 1
    assert told.splitlines()[-1] == ("python -m recfx explain: the output cannot be written: No space left on device")
    assert all("Traceback" not in err for _, err, _ in ended.values())
