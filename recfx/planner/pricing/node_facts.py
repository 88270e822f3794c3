"""What the formulas know about one node: the batch, the tables with the ids that reach them, the bags, the value; and
the numbers of one batch, for the symbols of expressions.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from numbers import Integral, Rational, Real
from types import MappingProxyType
from typing import Any, NamedTuple

import sympy

from recfx.errors import InputError, did_you_mean
from recfx.ir.meta import BATCH, WORLD, mean_length
from recfx.ir.tables import TableSpec
from recfx.optim.rules.rule import Rule
from recfx.planner.pricing.work import LENGTH


class Symbols(NamedTuple):
    """What amounts are expressed in: symbols, or the numbers of one batch, because formulas do not care which."""

    batch: Any  # samples per rank
    world: Any  # the number of ranks
    length: Callable[[str], Any]  # gives the mean number of ids per sample of a feature
    number: Callable[[Any], Any]  # gives the value of an expression in ``B``, ``W`` and ``L_<feature>``


SYMBOLS = Symbols(BATCH, WORLD, mean_length, sympy.sympify)


@dataclass(frozen=True, eq=False)
class TableLoad:
    """One table, or one shard of a table, with what a batch does to it on its rank."""

    spec: TableSpec  # the table or the shard
    ids: Any  # the number of ids that are looked up in it, an expression or a number
    samples: Any  # the number of samples whose bags it pools, likewise
    row_bytes: int  # bytes of one row
    # the fused optimizer that trains it; None if the backward returns a gradient, or if it is not trained
    rule: Rule | None = None
    is_trained: bool = True  # whether the backward reaches it

    @cached_property
    def bags(self) -> Any:
        return self.samples * len(self.spec.feature_names)

    @cached_property
    def returned_rows(self) -> Any:
        """The rows of a lookup's value: one per bag, or one per id if they are not pooled."""
        return self.bags if self.spec.is_pooled else self.ids

    @cached_property
    def distinct_rows(self) -> Any:
        """An upper bound of the rows that a batch touches."""
        if not isinstance(self.ids, sympy.Basic):
            return min(self.ids, self.spec.num_embeddings)
        # Not evaluated: sympy would try to compare the symbols.
        return sympy.Min(self.ids, sympy.Integer(self.spec.num_embeddings), evaluate=False)

    @cached_property
    def state_row_bytes(self) -> int:
        """Bytes of the fused optimizer's state of one row."""
        states = () if self.rule is None else self.rule.states
        return sum(4 * state.shape(1, self.spec.embedding_dim)[1] for state in states)


@dataclass(frozen=True)
class NodeFacts:
    """One node."""

    kind: str  # its kind
    # those that it works on; whole tables before ids are exchanged, this rank's shards afterwards
    tables: tuple[TableLoad, ...] = ()
    ids: Any = 0  # the number of ids that it takes
    bags: Any = 0  # the number of bags that they are in
    value_bytes: Any = 0  # bytes of its value, if that is rows
    is_weighted: bool = False  # whether ids carry weights
    is_pooled: bool = True  # whether the rows of its collection are combined
    ranges: int = 1  # the number of ranges of columns that it puts into order; 1 if they are in order
    rows: Any = 0  # the number of rows that it puts into order
    moves: bool = True  # whether it puts bags into another order
    trains: bool = True  # whether the step has a backward


def shares_of(tables: Iterable[TableSpec]) -> dict[str, tuple[str, float]]:
    """The feature of each length that counts different ids alone, and their expected share, 1 if it is not known."""
    shares: dict[str, tuple[str, float]] = {}
    for table in tables:
        for name, feature in zip(table.sent_lengths, table.feature_names, strict=True):
            if name != feature:
                shares[name] = feature, max(shares.get(name, ("", 0.0))[1], table.dedup.share or 1.0)
    return shares


class Values:
    """The numbers of one batch for the symbols of expressions, and in their place in formulas, which is fast."""

    def __init__(
        self,
        batch: Any,
        world: Any,
        lengths: Any,
        features: Iterable[str],
        shares: Mapping[str, tuple[str, float]] = MappingProxyType({}),
        known: Mapping[str, Fraction] = MappingProxyType({}),
    ) -> None:
        self.batch, self.world = whole_number(batch, "B"), whole_number(world, "W")
        self.lengths = _lengths(lengths, features, shares, known)
        self._known: dict[sympy.Expr, int | float] = {}

    def length(self, feature: str) -> float:
        """The mean number of ids per sample of a feature."""
        return float(self.lengths[feature])

    def number(self, expression: Any) -> int | float:
        """The value of an expression: an ``int`` if it is whole."""
        number: int | float
        if not isinstance(expression, sympy.Basic):
            return expression
        known = self._known.get(expression)
        if known is None:
            value: Any = expression.xreplace(self._symbols)
            number = float(value)
            known = self._known[expression] = int(value) if number.is_integer() else number
        return known

    @cached_property
    def _symbols(self) -> dict[sympy.Basic, sympy.Basic]:
        return {
            BATCH: sympy.Integer(self.batch),
            WORLD: sympy.Integer(self.world),
            **{mean_length(name): sympy.Rational(length) for name, length in self.lengths.items()},
        }


def whole_number(value: Any, name: str, least: int = 1, most: int | None = None) -> int:
    """A number that the user has passed for the argument ``name``, within bounds; otherwise ``invalid_argument``."""
    is_whole = isinstance(value, (Integral, sympy.Integer)) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        above = "" if most is None else f", and not above {most:,},"
        raise InputError(
            f"{name} is {value!r}.",
            reason="invalid_argument",
            what_to_do=f"pass a whole number that is not below {least}{above} for {name}.",
        )
    return int(value)


def _lengths(
    given: Any, features: Iterable[str], shares: Mapping[str, tuple[str, float]], known: Mapping[str, Fraction]
) -> dict[str, Fraction]:
    """The mean length of each feature: a number for all, or a mapping for some; the others are those that are known."""
    names = list(dict.fromkeys(features))
    given = dict(given) if isinstance(given, Mapping) else {} if given is None else {"": given}
    rest = given.pop("", None)  # the length of all features that are not named
    named = set(given)
    if rest is not None:
        given = dict.fromkeys((name for name in names if name not in shares), rest) | given
    unknown = [name for name in given if name not in names]
    # The lengths of a whole batch may be those of more features than the model has; otherwise it is a mistake.
    if unknown and any(name not in named and name not in shares for name in names):
        raise InputError(
            f"L names {unknown[0]!r}, which is no feature of the model{did_you_mean(unknown[0], names)}.",
            reason="unknown_feature",
            what_to_do=f"name some of {', '.join(names)}, or pass one number for all.",
        )
    lengths = {
        name: not_negative(given[name], f"the mean length of feature {name!r}")
        if name in given
        else known.get(name, Fraction(LENGTH))
        for name in names
    }
    for name in names:
        feature, share = shares.get(name, ("", 1.0))
        if name not in given and feature in lengths:
            lengths[name] = lengths[feature] * Fraction(share).limit_denominator(10**9)
    return lengths


def not_negative(value: Any, name: str) -> Fraction:
    """A finite number that the user has passed as ``name``, at least 0; otherwise ``invalid_argument``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise InputError(
            f"{name} is {value!r}.", reason="invalid_argument", what_to_do="pass a number that is not below 0."
        )
    # A mean is a ratio of small numbers, which a float only rounds.
    return Fraction(value) if isinstance(value, Rational) else Fraction(float(value)).limit_denominator(10**9)
