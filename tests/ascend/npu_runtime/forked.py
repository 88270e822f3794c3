"""Runs files of tests, each in a process forked from this one, which has imported torch, torch_npu and TorchRec.

Imports would take longer than most of the files. They come in the order of every program: torch_npu with torch. No
device is touched before the fork.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_IMPORTED = ("torch", "torchrec.distributed", "fbgemm_gpu", "torch.distributed.optim", "torch.export", "rich.table")
_ROOT = Path(__file__).resolve().parents[3]


class Forking:
    """Starts the process when it is needed, and again after one that took too long.

    Args:
        environment: of the process: of one that sees a simulated NPU, say.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def run(self, options: Sequence[str], environment: Mapping[str, str], printed: Path, timeout: float) -> int:
        """``python -m pytest`` with these options and further variables; what it prints goes to a file.

        Returns:
            the status that it ends with; of a signal, the negative number.

        Raises:
            subprocess.TimeoutExpired: the process, and what it has started, are ended.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], cwd=_ROOT, env=self._environment, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        print(json.dumps([list(options), dict(environment), str(printed)]), file=asked, flush=True)
        if not select.select([answers], [], [], timeout)[0]:
            self.stop()
            raise subprocess.TimeoutExpired(list(options), timeout)
        return int(answers.readline() or 1)  # nothing: it has ended

    def stop(self) -> None:
        """End it, and what it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _run(options: Sequence[str], environment: Mapping[str, str], printed: str) -> None:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for standard in (1, 2):
            os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
        os.environ.update(environment)
        import pytest

        status = pytest.main([*options])
        atexit._run_exitfuncs()  # ends the ranks that tests have started
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports print, too
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
