"""Triton's interpreter, in a process of its own: ``TRITON_INTERPRET`` is read when a kernel is defined."""

import atexit
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.ascend.faster_interpreter import make_faster
from tests.ascend.tools import ROOT, triton
from tests.support.room import with_room


class Interpreter:
    """The process: calls functions one at a time, with kernels that are interpreted."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function`` gives back there.

        Raises:
            AssertionError: with the traceback of what it raised.
        """
        self._pipe.send((function, arguments))
        failed, answer = self._pipe.recv()
        if failed:
            raise AssertionError(answer)
        return answer

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


@cache
def interpreter() -> Interpreter:
    """One for the whole run of tests."""
    started = Interpreter()
    atexit.register(started.stop)
    return started


WITHOUT_TORCHREC = "import sys\nsys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\n"
"""The begin of a program that runs as on a machine that has torch and Triton, but neither TorchRec nor FBGEMM."""


LONGEST = 900.0  # seconds, for a process


def interpreting() -> dict[str, str]:
    """The environment of a process whose kernels are interpreted."""
    return {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def run_interpreted(*arguments: str, **environment: str) -> str:
    """Run Python with these arguments, and further variables, and with kernels that are interpreted; what it prints."""
    triton().require()
    finished = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**interpreting(), **environment},
        capture_output=True, text=True, check=False, timeout=LONGEST,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-3000:]
    return finished.stdout


def _serve(pipe: Connection) -> None:
    make_faster()
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, with_room(function, *arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
