"""Which part of which table lives on which rank: what passes, state, checkpoints and reports read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from recfx.ir.shard import Shard
from recfx.ir.sharding_type import ShardingType
from recfx.ir.tables import TableSpec
from recfx.ir.way_back import WayBack, World


@dataclass(frozen=True)
class ShardedTable:
    """One table and its shards.

    Args:
        table: the whole table.
        type: how it is sharded.
        compute_kernel: ``"fused"`` or ``"dense"``.
        way_back: of its pooled rows.
        shards: by column block, then by row; empty ones included.
        planned_borders: where the plan cuts the rows; the cuts of a table with an index are at bucket borders instead.
    """

    table: TableSpec
    type: ShardingType
    compute_kernel: str
    way_back: WayBack
    shards: tuple[Shard, ...]
    planned_borders: tuple[int, ...] = ()

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all of it."""
        return self.type.is_replicated

    @cached_property
    def filled(self) -> tuple[Shard, ...]:
        """The shards that have rows."""
        return tuple(shard for shard in self.shards if not shard.is_empty)

    @cached_property
    def saved(self) -> tuple[Shard, ...]:
        """The shards that are saved and gathered: each number of the table once."""
        return tuple(shard for shard in self.filled if shard.rank == 0) if self.is_replicated else self.filled

    @cached_property
    def column_blocks(self) -> tuple[tuple[int, int], ...]:
        """The columns that it is cut into, from left to right: first column and the column after the last."""
        return tuple(sorted({shard.columns for shard in self.shards}))

    @cached_property
    def row_pieces(self) -> tuple[Shard, ...]:
        """The pieces that the rows of the first column block are cut into, empty ones included; none if they are not.

        Rows are cut at the same places in every column block.
        """
        return tuple(shard for shard in self.shards if shard.piece >= 0 and shard.columns == self.shards[0].columns)

    def row_borders(self) -> list[int]:
        """Where the rows are cut. Empty where they are not."""
        pieces = self.row_pieces
        return [*(shard.rows[0] for shard in pieces), pieces[-1].rows[1]] if pieces else []

    def stacked_row(self, shard: Shard) -> int:
        """Where a shard begins in what has one number per row and column block, one block after the other."""
        return self.column_blocks.index(shard.columns) * self.table.num_embeddings + shard.rows[0]

    def slices(self, shards: Sequence[Shard], rank: int | None = None) -> list[Shard]:
        """A shard for each slice of the rows, by row: what column blocks have in common (an index) is saved once.

        Args:
            shards: some of the table's.
            rank: whose shard is taken where it has one; else it is the first.
        """
        chosen: dict[tuple[int, int], Shard] = {}
        for shard in shards:
            if shard.rows not in chosen or (shard.rank == rank and chosen[shard.rows].rank != rank):
                chosen[shard.rows] = shard
        return [chosen[rows] for rows in sorted(chosen)]


@dataclass(frozen=True)
class CollectionSharding:
    """All tables of one collection, seen from one rank.

    Args:
        tables: in the collection's order.
        rank: this one.
        world_size: number of ranks.
    """

    tables: tuple[ShardedTable, ...]
    rank: int
    world_size: int

    @property
    def world(self) -> World:
        """This rank among the others."""
        return World(self.rank, self.world_size)

    @property
    def local_size(self) -> int:
        """Ranks of a host, where rows are summed inside hosts first; else 1."""
        return max((way.local_size for way in self.ways_back), default=1)

    @cached_property
    def ways_back(self) -> tuple[WayBack, ...]:
        """The ways in which pooled rows travel, in the order in which all ranks go through them."""
        return tuple(sorted({table.way_back for table in self.tables}, key=lambda way: (way.place, way.name)))

    def on_rank(self, rank: int) -> list[Shard]:
        """The shards of one rank that have rows, in the order in which it gets their features."""
        return [shard for way in self.ways_back for shard in self.travelling(way) if shard.rank == rank]

    def local(self) -> list[Shard]:
        """The shards of this rank."""
        return self.on_rank(self.rank)

    def local_of(self, table: str) -> list[Shard]:
        """The shards of one table on this rank."""
        return [shard for shard in self.named(table).filled if shard.rank == self.rank]

    def tables_of(self, way: WayBack) -> tuple[TableSpec, ...]:
        """The whole tables that travel one way."""
        return tuple(table.table for table in self.tables if table.way_back == way)

    def travelling(self, way: WayBack) -> list[Shard]:
        """The shards with rows of all ranks that travel one way, table after table."""
        return [shard for table in self.tables if table.way_back == way for shard in table.filled]

    def named(self, table: str) -> ShardedTable:
        """One table by name."""
        return self._by_name[table]

    @cached_property
    def _by_name(self) -> dict[str, ShardedTable]:
        return {each.table.name: each for each in self.tables}
