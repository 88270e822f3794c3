"""What one process of a run of tests has made, for the others of this run."""

import fcntl
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")
FOLDER: Path | None = None
"""Where the files of this run are; None if the run has one process, which needs none."""


def kept(name: str, make: Callable[[], Made]) -> Made:
    """What ``make`` gives, in the process that asks first; the others wait for it, and read it from a file.

    Args:
        name: of the file.
        make: its answer can be pickled.
    """
    if FOLDER is None:
        return make()
    file = FOLDER / name
    with file.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_bytes(pickle.dumps(make()))
        return pickle.loads(file.read_bytes())
