"""Which part of which table lives on which rank: what ``insert_dist`` and the state of a sharded collection read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torchrec.distributed.types import ShardingType

from recfx.ir.columns import Columns, columns_of
from recfx.ir.tables import TableSpec

DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
TABLE_WISE = ShardingType.TABLE_WISE.value
COLUMN_WISE = ShardingType.COLUMN_WISE.value
TABLE_COLUMN_WISE = ShardingType.TABLE_COLUMN_WISE.value
ROW_WISE = ShardingType.ROW_WISE.value
TABLE_ROW_WISE = ShardingType.TABLE_ROW_WISE.value
GRID_SHARD = ShardingType.GRID_SHARD.value

# How pooled rows travel back. Tables of one group share a lookup and an ``output_dist``; groups always in this order.
GROUPS = (TABLE_WISE, ROW_WISE, TABLE_ROW_WISE, DATA_PARALLEL)


@dataclass(frozen=True)
class Shard:
    """A rectangle of one table on one rank.

    Args:
        table: the table.
        rank: where it lives; a data-parallel table has one shard a rank.
        rows: first row and the row after the last.
        columns: first column and the column after the last.
        piece: which of the pieces that the rows of these columns are cut into; -1 where they are not cut.
        name: of the shard on its rank: the table's, with a number if there are several there.
    """

    table: TableSpec
    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    piece: int = -1
    name: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether it has no rows: it takes no part in anything but the metadata of checkpoints."""
        return self.rows[0] == self.rows[1]

    @property
    def output_columns(self) -> list[Columns]:
        """What it holds of the table's output keys."""
        return columns_of((self.spec,))

    @cached_property
    def spec(self) -> TableSpec:
        """The shard as a table of its rank. It pools sums; ``mean_divide`` comes last."""
        names = tuple(f"{name}{self.name.removeprefix(self.table.name)}" for name in self.table.embedding_names)
        return replace(
            self.table,
            name=self.name,
            embedding_names=names,
            num_embeddings=self.rows[1] - self.rows[0],
            embedding_dim=self.columns[1] - self.columns[0],
            pooling="SUM",
            shard_of=self.table.name,
            shard_keys=self.table.embedding_names,
            first_row=self.rows[0],
            first_column=self.columns[0],
        )


@dataclass(frozen=True)
class ShardedTable:
    """One table and its shards.

    Args:
        table: the whole table.
        sharding_type: one of TorchRec's.
        compute_kernel: ``"fused"`` or ``"dense"``.
        group: one of ``GROUPS``.
        shards: by column block, then by row; empty ones included.
        planned_borders: where the plan cuts the rows; the cuts of a table with an index are at bucket borders instead.
    """

    table: TableSpec
    sharding_type: str
    compute_kernel: str
    group: str
    shards: tuple[Shard, ...]
    planned_borders: tuple[int, ...] = ()

    def row_borders(self) -> list[int]:
        """Where the rows are cut; the same in every column block. Empty where they are not."""
        first = [shard for shard in self.shards if shard.columns == self.shards[0].columns]
        return [] if first[0].piece < 0 else [*(shard.rows[0] for shard in first), first[-1].rows[1]]

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all of it."""
        return self.sharding_type == DATA_PARALLEL


@dataclass(frozen=True)
class CollectionSharding:
    """All tables of one collection, seen from one rank.

    Args:
        tables: in the collection's order.
        rank: this one.
        world_size: number of ranks.
        local_size: ranks of a host, where a table is cut inside one; else 1.
    """

    tables: tuple[ShardedTable, ...]
    rank: int
    world_size: int
    local_size: int = 1

    def on_rank(self, rank: int, groups: tuple[str, ...] = GROUPS) -> list[Shard]:
        """The shards of one rank that have rows, in the order in which it gets their features."""
        return [
            shard
            for group in groups
            for table in self.tables
            if table.group == group
            for shard in table.shards
            if shard.rank == rank and not shard.is_empty
        ]

    def local(self, groups: tuple[str, ...] = GROUPS) -> list[Shard]:
        """The shards of this rank."""
        return self.on_rank(self.rank, groups)

    def local_of(self, table: str) -> list[Shard]:
        """The shards of one table on this rank."""
        return [shard for shard in self.named(table).shards if shard.rank == self.rank and not shard.is_empty]

    def of_group(self, group: str) -> tuple[TableSpec, ...]:
        """The whole tables of a group."""
        return tuple(table.table for table in self.tables if table.group == group)

    def named(self, table: str) -> ShardedTable:
        """One table by name."""
        return self._by_name[table]

    @cached_property
    def _by_name(self) -> dict[str, ShardedTable]:
        return {each.table.name: each for each in self.tables}


def name_shards(shards: list[Shard]) -> tuple[Shard, ...]:
    """Name the shards of one table: where a rank has several, the second is ``<table>@1`` and so on."""
    seen: dict[int, int] = {}
    named = []
    for shard in shards:
        number = seen[shard.rank] = seen.get(shard.rank, -1) + (not shard.is_empty)
        named.append(replace(shard, name=f"{shard.table.name}@{number}" if number > 0 else shard.table.name))
    return tuple(named)
