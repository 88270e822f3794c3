"""Hashing: tables whose rows belong to raw 64-bit ids."""

from recfx.hashing.config import HashConfig, ResolvedHashConfig, as_integer
from recfx.hashing.index import HashIndex, Occupancy

__all__ = ["HashConfig", "HashIndex", "Occupancy", "ResolvedHashConfig", "as_integer"]


def __dir__() -> list[str]:
    return __all__
