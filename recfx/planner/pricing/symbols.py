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
        samples_of_all: the samples of all ranks, if that is not ``world`` times ``batch``.
        length_of_all: gives the mean over all ranks, if that is another one.
    """

    batch: Any
    world: Any
    length: Callable[[str], Any]
    samples_of_all: Any = None
    length_of_all: Callable[[str], Any] | None = None

    @property
    def everybody(self) -> Any:
        """The samples of all ranks."""
        return self.world * self.batch if self.samples_of_all is None else self.samples_of_all

    def arriving(self, feature: str) -> Any:
        """The mean number of ids per sample of all ranks."""
        return (self.length_of_all or self.length)(feature)


SYMBOLS = Symbols(BATCH, WORLD, mean_length)


def total(terms: Iterable[Any]) -> Any:
    """The sum of expressions or of numbers; a sum of many expressions, one by one, would take quadratic time."""
    found = list(terms)
    if any(isinstance(term, sympy.Basic) for term in found):
        return sympy.Add(*found)
    return sum(found)
