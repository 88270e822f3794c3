"""Numbers for the symbols of expressions: the batch of a rank, the number of ranks, the lengths of features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cached_property
from numbers import Real
from typing import Any

import sympy

from recfx.errors import InputError
from recfx.ir.meta import BATCH, WORLD, mean_length
from recfx.pricing.symbols import Symbols
from recfx.pricing.work import plain_number

BATCH_SIZE, LENGTH = 512, 1
"""What TorchRec's planner assumes of a batch of which nothing is known: samples per rank, and ids per bag."""


class Values:
    """Evaluates expressions, each of them once.

    Args:
        batch: samples per rank.
        world: the number of ranks.
        lengths: the mean number of ids per sample, for all features or by feature.
        features: the features that there are.

    Raises:
        InputError: ``invalid_argument``, ``missing_feature``.
    """

    def __init__(self, batch: Any, world: Any, lengths: Any, features: Iterable[str]) -> None:
        self.batch, self.world = _whole(batch, "B"), _whole(world, "W")
        names = list(dict.fromkeys(features))
        given = lengths if isinstance(lengths, Mapping) else dict.fromkeys(names, lengths)
        missing = [name for name in names if name not in given]
        if missing:
            raise InputError(
                f"L has no mean length for feature {missing[0]!r}"
                + (f" and {len(missing) - 1} more." if len(missing) > 1 else "."),
                reason="missing_feature",
                what_to_do="pass one number for all features, or a number for each of them.",
            )
        self.lengths = {name: _length(given[name], name) for name in names}
        self._symbols: dict[sympy.Basic, sympy.Basic] = {
            BATCH: sympy.Integer(self.batch),
            WORLD: sympy.Integer(self.world),
            **{mean_length(name): sympy.Rational(length) for name, length in self.lengths.items()},
        }
        self._known: dict[sympy.Expr, int | float] = {}

    @cached_property
    def symbols(self) -> Symbols:
        """The same for formulas, which are then fast."""
        lengths = {name: float(length) for name, length in self.lengths.items()}
        return Symbols(self.batch, self.world, lengths.__getitem__)

    def number(self, expression: Any) -> int | float:
        """The value of an expression: an ``int`` if it is whole."""
        if not isinstance(expression, sympy.Basic):
            number: int | float = expression
            return number
        found = self._known.get(expression)
        if found is None:
            found = self._known[expression] = plain_number(expression.xreplace(self._symbols))
        return found


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, sympy.Integer)) or value < 1:
        raise InputError(
            f"{name} is {value!r}.", reason="invalid_argument", what_to_do=f"pass a whole number above 0 for {name}."
        )
    return int(value)


def _length(value: Any, feature: str) -> Fraction:
    try:
        # A mean is a ratio of small numbers, which a float only rounds.
        length = Fraction(float(value)).limit_denominator(10**9) if isinstance(value, float) else Fraction(value)
    except (TypeError, ValueError, OverflowError):
        length = Fraction(-1)
    if isinstance(value, (bool, str)) or not isinstance(value, (Real, sympy.Rational)) or length < 0:
        raise InputError(
            f"the mean length of feature {feature!r} is {value!r}.",
            reason="invalid_argument",
            what_to_do="pass a number that is not below 0.",
        )
    return length
