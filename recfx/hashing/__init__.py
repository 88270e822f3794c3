"""Hashing: tables whose rows belong to raw 64-bit ids."""

from recfx.hashing.config import HashConfig, ResolvedHashConfig, as_integer
from recfx.hashing.index import HashIndex, Occupancy
from recfx.hashing.slices import row_cuts

__all__ = ["HashConfig", "HashIndex", "Occupancy", "ResolvedHashConfig", "as_integer", "row_cuts"]


def __dir__() -> list[str]:
    return __all__
