"""What stands for a batch in formulas: the symbols of expressions, or numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import sympy

from recfx.ir.meta import BATCH, WORLD, mean_length


class Symbols(NamedTuple):
    """Either symbols or numbers; formulas do not care which.

    Args:
        batch: samples per rank.
        world: the number of ranks.
        length: gives the mean number of ids per sample of a feature.
    """

    batch: Any
    world: Any
    length: Callable[[str], Any]


SYMBOLS = Symbols(BATCH, WORLD, mean_length)


def total(terms: Iterable[Any]) -> Any:
    """The sum of expressions or of numbers; a sum of many expressions, one by one, would take quadratic time."""
    found = list(terms)
    if any(isinstance(term, sympy.Basic) for term in found):
        return sympy.Add(*found)
    return sum(found)
