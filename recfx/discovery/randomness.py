"""Fixed random numbers for checks, without disturbing the caller's."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator

import numpy
import torch


@contextlib.contextmanager
def fixed_randomness(seed: int = 0) -> Iterator[None]:
    """Seed torch, numpy and Python inside, and run deterministically; restore their states afterwards."""
    python, array = random.getstate(), numpy.random.get_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            # Uninitialised memory is filled with NaN, so code that reads it (the backward of torchrec's
            # KTRegroupAsDict, for keys in no group) gives the same result each time.
            warnings.filterwarnings("ignore", ".*deterministic.*")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warns_only)
        random.setstate(python)
        numpy.random.set_state(array)
