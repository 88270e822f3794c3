"""Fixed random numbers for checks, without disturbing the caller's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy
import torch


@contextlib.contextmanager
def fixed_randomness(seed: int = 0) -> Iterator[None]:
    """Seed torch, numpy and Python inside; give back their states after."""
    python, array = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)
