"""What a writer that is killed at its k-th file operation leaves, for every k.

``python -m tests.checkpoint.killed_writer DIRECTORY``. The kernel keeps what a killed process has written, and nothing
else. So one writer makes a copy of the directory before each of its operations (and in the middle of every fourth
write), and each copy is what SIGKILL would have left then. Some writers are really killed, to show that it is so.

Prints, for each operation, whether a process was killed, the version of the model that loads then, and the files that
are there after the next save. That save is tried once for every set of files: of what a writer has left in a data
folder, the next one reads the names alone.
"""

from __future__ import annotations

import builtins
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

import recfx
from recfx.checkpoint import directory as checkpoint_directory
from tests.checkpoint.training import OnePart, Training, assert_same

_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"}
KILLED_EVERY = 15


class Operations:
    """Counts the operations below a directory.

    Args:
        directory: the directory.
        before: called before each operation with its number, from 1 on.
    """

    def __init__(self, directory: Path, before: Callable[[int], None]) -> None:
        self.number, self._directory, self._before, self._is_counting = 0, str(directory), before, True

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and arguments and self._directory in os.fsdecode(_name(arguments[0])):
            self.count()

    def count(self) -> None:
        if self._is_counting:
            self.number += 1
            self._is_counting = False
            self._before(self.number)
            self._is_counting = True

    def stop(self) -> None:
        self._is_counting = False


def _name(argument: Any) -> Any:
    return argument if isinstance(argument, (str, bytes, os.PathLike)) else str(argument)


class TornStream:
    """A file of which every fourth write counts, when half of its bytes are written."""

    def __init__(self, stream: Any, operations: Operations) -> None:
        self._stream = stream
        self._operations = operations
        self._writes = 0

    def write(self, content: Any) -> int:
        written = 0
        if self._writes % 4 == 0:
            written = self._stream.write(bytes(content)[: len(content) // 2])
            self._stream.flush()
            self._operations.count()
        self._writes += 1
        return written + self._stream.write(content[written:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> TornStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()


def arm(operations: Operations) -> None:
    """Count from here on, until ``operations`` are stopped."""
    os.fsync = lambda descriptor: None  # takes long, and a killed process does not lose what the system has
    sys.addaudithook(operations.audit)
    create_stream = FileSystem.create_stream

    @contextmanager
    def torn_stream(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with create_stream(self, path, mode) as stream:
            yield TornStream(stream, operations)

    def torn_open(*args: Any) -> TornStream:
        return TornStream(builtins.open(*args), operations)  # closed by TornStream

    FileSystem.create_stream = torn_stream
    checkpoint_directory.open = torn_open


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
    torch.set_num_threads(1)  # a forked process has none of the threads of a pool
    training, target = (Training.build("adam", rows=40, seed=seed, model_class=OnePart) for seed in (0, 1))
    training.steps(0, 2)
    set_version(training, 0)
    recfx.save_checkpoint(training.model, directory)
    before = directory.with_name("before")
    shutil.copytree(directory, before)
    set_version(training, 1)
    copies: list[Path] = []

    def copy(number: int) -> None:
        copies.append(directory.with_name(f"copy{number}"))
        shutil.copytree(directory, copies[-1])

    killed = {}
    number = 1
    while True:  # before this process counts: a hook cannot be removed
        place = Path(shutil.copytree(before, directory.with_name(f"killed{number}")))
        child = os.fork()
        if child == 0:
            arm(Operations(place, partial(_killed_at, number)))
            recfx.save_checkpoint(training.model, place)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            break
        killed[number] = place
        number += KILLED_EVERY
    operations = Operations(directory, copy)
    arm(operations)
    recfx.save_checkpoint(training.model, directory)
    operations.stop()
    for number, place in killed.items():
        assert len([*place.rglob("*")]) == len([*copies[number - 1].rglob("*")]), number
    saved_over: list[dict[str, bytes]] = []
    for number, place in [*enumerate([*copies, directory], start=1), *killed.items()]:
        version, left, is_killed = _loaded(training, target, place), _left(place), place in killed.values()
        files: list[str] = []
        if is_killed or left not in saved_over:
            saved_over.append(left)
            recfx.save_checkpoint(training.model, place)
            assert _loaded(training, target, place) == version
            files = os.listdir(place)
        print(number, int(is_killed), version, *files, flush=True)


def _killed_at(last: int, number: int) -> None:
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)


def _left(directory: Path) -> dict[str, bytes]:
    """What the next writer can tell apart: all names, and the content of what is not in a data folder."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.parent == directory and path.is_file() else b""
        for path in directory.rglob("*")
    }


def _loaded(training: Training, target: Training, directory: Path) -> int:
    """The version that loads, which must be whole. ``training`` has it then."""
    recfx.load_checkpoint(target.model, directory)
    version = int(target.model.after.bias[0].detach())
    set_version(training, version)
    expected = {name: value for name, value in training.everything().items() if _is_compared(name)}
    assert_same({name: value for name, value in target.everything().items() if _is_compared(name)}, expected)
    return version


def _is_compared(name: str) -> bool:
    return not name.startswith("optimizer.") and not name.endswith((".slot_groups",))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
