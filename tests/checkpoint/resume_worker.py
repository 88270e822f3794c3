"""Resume trainings in a process that has not seen them: ``python -m tests.checkpoint.resume_worker FOLDER THREADS``."""

import sys
from pathlib import Path

import torch

from tests.checkpoint.training import CONFIGS, Training, WithSequences

STEPS = 6


def resume(folder: Path) -> None:
    """Every checkpoint ``<kind>-<config>`` in ``folder``: load, train on, write losses and state beside it."""
    for directory in sorted(folder.iterdir()):
        kind, _, config = directory.name.partition("-")
        training = Training.build(kind, CONFIGS[config], seed=99, model_class=WithSequences)
        training.load(directory)
        loaded = training.everything()
        losses = training.steps(STEPS, 2 * STEPS)
        torch.save((loaded, losses, training.everything()), folder / f"{directory.name}.pt")


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    resume(Path(sys.argv[1]))
