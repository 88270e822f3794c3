"""What the formulas know about one node: the batch, the tables with the ids that reach them, the bags, the value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import sympy

from recfx.ir.meta import BATCH, WORLD, mean_length
from recfx.ir.tables import TableSpec
from recfx.optim.rules.rule import Rule
from recfx.planner.pricing.work import total


class Symbols(NamedTuple):
    """What amounts are expressed in: symbols, or the numbers of one batch, because formulas do not care which.

    Args:
        batch: samples per rank.
        world: the number of ranks.
        length: gives the mean number of ids per sample of a feature.
        number: gives the value of an expression in ``B``, ``W`` and ``L_<feature>``.
    """

    batch: Any
    world: Any
    length: Callable[[str], Any]
    number: Callable[[Any], Any]


SYMBOLS = Symbols(BATCH, WORLD, mean_length, sympy.sympify)


@dataclass(frozen=True, eq=False)
class TableLoad:
    """One table, or one shard of a table, with what a batch does to it on its rank.

    Args:
        spec: the table or the shard.
        ids: the number of ids that are looked up in it, an expression or a number.
        samples: the number of samples whose bags it pools, likewise.
        row_bytes: bytes of one row.
        rule: the fused optimizer that trains it; None if the backward returns a gradient, or if it is not trained.
        is_trained: whether the backward reaches it.
    """

    spec: TableSpec
    ids: Any
    samples: Any
    row_bytes: int
    rule: Rule | None = None
    is_trained: bool = True

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

    @classmethod
    def of(
        cls,
        spec: TableSpec,
        rows_of_table: int,
        row_bytes: int,
        rule: Rule | None = None,
        is_trained: bool = True,
        symbols: Symbols = SYMBOLS,
    ) -> TableLoad:
        """The load of a table, or of a shard, which gets the ids of all ranks; all rows of the whole table are equally
        likely.
        """
        samples = symbols.batch * symbols.world if spec.shard_of else symbols.batch
        lengths = total(map(symbols.length, spec.sent_lengths if spec.shard_of else spec.feature_names))
        share = symbols.number(sympy.Rational(spec.num_embeddings, rows_of_table))
        return cls(spec, samples * lengths * share, samples, row_bytes, rule, is_trained)


@dataclass(frozen=True)
class NodeFacts:
    """One node.

    Args:
        kind: its kind.
        tables: those that it works on; whole tables before ids are exchanged, this rank's shards afterwards.
        ids: the number of ids that it takes.
        bags: the number of bags that they are in.
        sent_bags: the number of bags that leave it, if it copies bags to several ranks.
        value_bytes: bytes of its value, if that is rows.
        is_weighted: whether ids carry weights.
        is_pooled: whether the rows of its collection are combined.
        parts: the number of its inputs that hold rows.
        ranges: the number of ranges of columns that it puts into order; 1 if they are in order.
        rows: the number of rows that it puts into order.
        moves: whether it puts bags into another order.
        trains: whether the step has a backward.
    """

    kind: str
    tables: tuple[TableLoad, ...] = ()
    ids: Any = 0
    bags: Any = 0
    sent_bags: Any = 0
    value_bytes: Any = 0
    is_weighted: bool = False
    is_pooled: bool = True
    parts: int = 1
    ranges: int = 1
    rows: Any = 0
    moves: bool = True
    trains: bool = True
