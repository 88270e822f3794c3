"""What a writer leaves that is killed at its k-th file operation, for every k.

``python -m tests.checkpoint.killed_writer DIRECTORY``.

Prints, for each k, the version of the model that loads then, and the files that are there after the next save.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import recfx
from tests.checkpoint.training import OnePart, Training, assert_same

_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"}


def kill_at(last: int, directory: Path) -> None:
    """Kill this process before its ``last`` operation below ``directory``."""
    number = 0

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal number
        if event in _EVENTS and arguments and str(directory) in str(arguments[0]):
            number += 1
            if number == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


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
    status, number = -signal.SIGKILL, 1
    while status == -signal.SIGKILL:
        place = Path(shutil.copytree(directory, directory.with_name(f"killed{number}")))
        set_version(training, 1)
        child = os.fork()
        if child == 0:
            kill_at(number, place)
            recfx.save_checkpoint(training.model, place)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        version = _loaded(training, target, place)
        recfx.save_checkpoint(training.model, place)
        assert _loaded(training, target, place) == version
        print(number, version, *os.listdir(place), flush=True)
        number += 1


def _loaded(training: Training, target: Training, directory: Path) -> int:
    """The version that loads, which must be whole. ``training`` has it then."""
    recfx.load_checkpoint(target.model, directory)
    version = int(target.model.after.bias[0].detach())
    set_version(training, version)
    expected, loaded = (
        {name: value for name, value in of.everything().items() if not name.startswith("optimizer.")}
        for of in (training, target)
    )
    for contents in (expected, loaded):
        del contents["first.a.slot_groups"]  # which order ids came in
    assert_same(loaded, expected)
    return version


if __name__ == "__main__":
    main(Path(sys.argv[1]))
