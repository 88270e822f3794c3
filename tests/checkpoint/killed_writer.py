"""Kill a writer at its k-th file operation, for every k: ``python -m tests.checkpoint.killed_writer DIRECTORY``.

Each attempt saves another version of the model in a forked process, which kills itself with SIGKILL before the k-th
operation below DIRECTORY (or in the middle of it, for every fourth write). Prints, for each attempt, the version that
loads then.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

import recfx
from recfx.checkpoint import directory as checkpoint_directory
from tests.checkpoint.training import OnePart, Training, assert_same

_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"}


class Countdown:
    """Kills this process at the k-th operation."""

    def __init__(self, left: int, directory: Path) -> None:
        self.left = left
        self.directory = str(directory)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and arguments and self.directory in os.fsdecode(_name(arguments[0])):
            self.count()

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _name(argument: Any) -> Any:
    return argument if isinstance(argument, (str, bytes, os.PathLike)) else str(argument)


class TornStream:
    """A file of which every fourth write counts; the one that kills has written half of its bytes."""

    def __init__(self, stream: Any, countdown: Countdown) -> None:
        self._stream = stream
        self._countdown = countdown
        self._writes = 0

    def write(self, content: Any) -> int:
        if self._writes % 4 == 0:
            if self._countdown.left == 1:
                self._stream.write(bytes(content)[: len(content) // 2])
                self._stream.flush()
            self._countdown.count()
        self._writes += 1
        written: int = self._stream.write(content)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> TornStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()


def arm(operation: int, directory: Path) -> None:
    """From here on this process lives for ``operation - 1`` operations."""
    countdown = Countdown(operation, directory)
    os.fsync = lambda descriptor: None  # takes long, and a killed process does not lose what the system has
    sys.addaudithook(countdown.audit)
    create_stream = FileSystem.create_stream

    @contextmanager
    def torn_stream(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with create_stream(self, path, mode) as stream:
            yield TornStream(stream, countdown)

    FileSystem.create_stream = torn_stream
    checkpoint_directory.open = _torn_open(countdown)


def _torn_open(countdown: Countdown) -> Any:
    def torn_open(*args: Any) -> TornStream:
        return TornStream(builtins.open(*args), countdown)  # closed by TornStream

    return torn_open


def set_version(training: Training, version: int) -> None:
    """Every float of model and optimizers becomes ``version``; ids stay."""
    with torch.no_grad():
        for value in training.model.state_dict().values():
            if value.is_floating_point():
                value.fill_(version)
        for attached in training.user_optimizers.values():
            for state in attached.state.values():
                for value in state.values():
                    value.fill_(version)


def main(directory: Path) -> None:
    """Save, and be killed one operation later each time, until a save comes through."""
    torch.set_num_threads(1)  # a forked process has none of the threads of a pool
    training, target = (Training.build("adam", rows=40, seed=seed, model_class=OnePart) for seed in (0, 1))
    training.steps(0, 2)
    set_version(training, 0)
    recfx.save_checkpoint(training.model, directory)
    attempt = 0
    while True:
        attempt += 1
        set_version(training, attempt)
        child = os.fork()
        if child == 0:
            arm(attempt, directory)
            recfx.save_checkpoint(training.model, directory)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        recfx.load_checkpoint(target.model, directory)
        version = int(target.model.after.bias[0].detach())
        set_version(training, version)
        wanted = {name: value for name, value in training.everything().items() if _is_compared(name)}
        assert_same({name: value for name, value in target.everything().items() if _is_compared(name)}, wanted)
        print(attempt, status, version, flush=True)
        if status != -signal.SIGKILL:
            return


def _is_compared(name: str) -> bool:
    return not name.startswith("optimizer.") and not name.endswith((".slot_groups",))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
