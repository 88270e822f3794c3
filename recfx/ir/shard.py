"""A shard: a rectangle of one table on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from torch import Tensor

from recfx.ir.dedup import Dedup
from recfx.ir.meta import mean_length
from recfx.ir.tables import Columns, TableSpec


@dataclass(frozen=True)
class Shard:
    """A rectangle of one table on one rank.

    Args:
        table: the table.
        rank: the rank that holds it; a replicated table has one shard per rank.
        rows: the first row and the row after the last.
        columns: the first column and the column after the last.
        piece: the number of the piece, if the rows of these columns are cut into pieces; otherwise -1. It decides how
            ids are routed: a shard without a number gets all ids of its features, and a numbered shard gets those of
            its rows.
        name: the name of the shard on its rank: the table's, with a number if the rank has several of its shards.
    """

    table: TableSpec
    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    piece: int = -1
    name: str = ""

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def is_empty(self) -> bool:
        """Whether it has no rows. An empty shard appears only in the metadata of checkpoints."""
        return self.num_rows == 0

    @cached_property
    def output_columns(self) -> list[Columns]:
        """The columns of the table's output keys that it holds."""
        first, dim, dtype = self.columns[0], self.num_columns, self.table.output_dtype
        return [Columns(key, first, dim, dtype) for key in self.table.embedding_names]

    @property
    def keys(self) -> tuple[str, ...]:
        """Its keys among those that are sent."""
        return tuple(f"{name}{self.name.removeprefix(self.table.name)}" for name in self.table.embedding_names)

    def expected_ids(self, length: Callable[[str], Any] = mean_length) -> Any:
        """How many ids a sample sends to it, if all rows are equally likely and lengths are such: an expression, or a
        number if ``length`` gives numbers.
        """
        share = Fraction(self.num_rows, self.table.num_embeddings)
        return sum(share * length(name) for name in self.table.sent_lengths)

    def of(self, whole: Tensor) -> Tensor:
        """A view of this rectangle in the ``[rows, dim]`` tensor of the whole table."""
        return whole[slice(*self.rows), slice(*self.columns)]

    @cached_property
    def spec(self) -> TableSpec:
        """The shard as a table of its rank. What is pooled are sums; ``mean_divide`` divides them at the end."""
        return replace(
            self.table,
            name=self.name,
            embedding_names=self.keys,
            num_embeddings=self.num_rows,
            embedding_dim=self.num_columns,
            pooling="SUM" if self.table.is_pooled else self.table.pooling,
            shard_of=self.table.name,
            shard_keys=self.table.embedding_names,
            first_row=self.rows[0],
            first_column=self.columns[0],
            dedup=Dedup(self.table.sends_different),
        )


def name_shards(shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """Name the shards of one table: if a rank has several, the second is ``<table>@1`` and so on."""
    seen: dict[int, int] = {}
    named = []
    for shard in shards:
        number = seen[shard.rank] = seen.get(shard.rank, -1) + (not shard.is_empty)
        named.append(replace(shard, name=f"{shard.table.name}@{number}" if number > 0 else shard.table.name))
    return tuple(named)
