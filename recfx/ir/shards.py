"""Sharding types, and which parts of which tables each rank holds, for passes, state, checkpoints and reports."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

from torchrec.distributed.types import ParameterSharding

from recfx.ir.meta import Frozen
from recfx.ir.tables import Shard, TableSpec
from recfx.ir.ways_back import STAY, Travelling, WayBack, Wires


@dataclass(frozen=True)
class TablePlan:
    """What a plan says about one table of the collection at ``path``."""

    table: TableSpec
    parameter: ParameterSharding
    world_size: int
    path: str = ""


class Cut(NamedTuple):
    """Where the shards of one table are, by column block, then by row, and how their rows travel back if pooled.

    Empty shards are included, and shards have no names yet. A table with an index is cut at bucket borders.
    """

    shards: Sequence[Shard]
    way_back: WayBack


@dataclass(frozen=True)
class ShardingType:
    """A way to cut a table and to place its parts. All else follows from it: the routing of ids from the shards that
    :meth:`cut` returns, and collectives and the averaging of gradients from their way back. All objects of one type are
    equal.
    """

    name: ClassVar[str]  # in plans: the value of TorchRec's ``ShardingType``
    # Whether every rank has the whole table: replicas see the ids of all ranks, and rank 0 saves plain tensors of them.
    is_replicated: ClassVar[bool] = False
    cuts_rows: ClassVar[bool] = False  # whether the rows of one column block are on several ranks
    kernels: ClassVar[tuple[str, ...]] = ("fused", "dense")  # the compute kernels that sharders offer for it
    unplanned_kernels: ClassVar[tuple[str, ...]] = ("dense",)  # those that TorchRec's planner refuses in its result
    is_planned: ClassVar[bool] = True  # whether TorchRec's planner can enumerate the type; it only knows its own types

    def cut(self, plan: TablePlan) -> Cut:
        """Read and check what a plan says about one table.

        The rows of a table with an index are cut at bucket borders, into as many pieces as the plan has; all other cuts
        are those of the plan, so that checkpoints match TorchRec's.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Unsharded(ShardingType):
    """All of the table is one shard, on the only rank; no plan says so."""

    name = "unsharded"


@dataclass(frozen=True)
class ShardedTable(Frozen):
    """One table and its shards."""

    table: TableSpec  # the whole table
    type: ShardingType  # how it is sharded
    compute_kernel: str  # ``"fused"`` or ``"dense"``
    way_back: WayBack  # how its pooled rows travel back
    shards: tuple[Shard, ...]  # by column block, then by row, including empty ones

    @property
    def is_replicated(self) -> bool:
        return self.type.is_replicated

    @property
    def placement(self) -> str:
        shards = [f"rows {shard.rows}, columns {shard.columns} on rank {shard.rank}" for shard in self.shards]
        return f"table {self.table.name!r} {self.type.name} with kernel {self.compute_kernel} ({'; '.join(shards)})"

    @cached_property
    def filled(self) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards if not shard.is_empty)

    @cached_property
    def times_sent(self) -> int:
        """How often its ids are sent: to every shard, but only once for each block of columns whose rows are cut."""
        pieces = [shard.columns for shard in self.filled if shard.piece >= 0]
        return len(self.filled) - len(pieces) + len(set(pieces))

    @cached_property
    def saved(self) -> tuple[Shard, ...]:
        """The shards that are saved and gathered; they contain each element of the table once."""
        return tuple(shard for shard in self.filled if shard.rank == 0) if self.is_replicated else self.filled

    @cached_property
    def column_blocks(self) -> tuple[tuple[int, int], ...]:
        """The blocks that its columns are cut into, from left to right: first column and column after the last."""
        return tuple(sorted({shard.columns for shard in self.shards}))

    @cached_property
    def row_pieces(self) -> tuple[Shard, ...]:
        """The pieces of the first column block's rows, including empty ones; there are none if the rows are not cut.

        Rows are cut at the same places in every column block.
        """
        return tuple(shard for shard in self.shards if shard.piece >= 0 and shard.columns == self.shards[0].columns)

    def row_borders(self) -> list[int]:
        pieces = self.row_pieces
        return [*(shard.rows[0] for shard in pieces), pieces[-1].rows[1]] if pieces else []

    def stacked_row(self, shard: Shard) -> int:
        """Where a shard begins in a tensor that has one number per row and column block, one block after the other."""
        return self.column_blocks.index(shard.columns) * self.table.num_embeddings + shard.rows[0]

    def slices(self, shards: Sequence[Shard], rank: int | None = None) -> list[Shard]:
        """One shard per slice of the rows, by row, for saving once what column blocks have in common (an index): that
        of ``rank``, if it has one, or the first.
        """
        chosen: dict[tuple[int, int], Shard] = {}
        for shard in shards:
            if shard.rows not in chosen or (shard.rank == rank and chosen[shard.rows].rank != rank):
                chosen[shard.rows] = shard
        return [chosen[rows] for rows in sorted(chosen)]


@dataclass(frozen=True)
class CollectionSharding(Frozen):
    """All tables of one collection, seen from one rank; ``wires`` say in which precision rows are sent."""

    tables: tuple[ShardedTable, ...]
    rank: int
    world_size: int
    wires: Wires = field(default_factory=dict)

    @property
    def local_size(self) -> int:
        """The number of ranks per host, if rows are first summed within hosts; otherwise 1."""
        return max((way.local_size for way in self.ways_back), default=1)

    @cached_property
    def ways_back(self) -> tuple[WayBack, ...]:
        """The ways in which pooled rows travel back, in the order in which all ranks go through them."""
        return tuple(sorted({table.way_back for table in self.tables}, key=lambda way: (way.place, way.name)))

    @cached_property
    def cuts_rows(self) -> bool:
        """Whether some shards have only some of the rows of their table, so that ids are sent by their rows."""
        return self.world_size > 1 and any(shard.piece >= 0 for table in self.tables for shard in table.filled)

    def on_rank(self, rank: int) -> list[Shard]:
        """The shards of one rank that have rows, in the order in which the rank receives their features."""
        return list(self._on_ranks[rank])

    def by_rank(self) -> list[Shard]:
        """The shards of all ranks that have rows, rank by rank: in the order of the features that are sent to them."""
        return [shard for shards in self._on_ranks for shard in shards]

    @cached_property
    def _on_ranks(self) -> tuple[list[Shard], ...]:
        on_ranks: tuple[list[Shard], ...] = tuple([] for _ in range(self.world_size))
        for way in self.ways_back:
            for shard in self.travelling(way).shards:
                on_ranks[shard.rank].append(shard)
        return on_ranks

    def local(self) -> list[Shard]:
        return self.on_rank(self.rank)

    def local_of(self, table: str) -> list[Shard]:
        return [shard for shard in self.named(table).filled if shard.rank == self.rank]

    def tables_of(self, way: WayBack) -> tuple[TableSpec, ...]:
        """The whole tables whose pooled rows travel back this way."""
        return tuple(table.table for table in self.tables if table.way_back == way)

    def travelling(self, way: WayBack) -> Travelling:
        """The shards of all ranks that have rows and travel back this way, table by table."""
        return self._travelling[way]

    @cached_property
    def _travelling(self) -> dict[WayBack, Travelling]:
        shards: dict[WayBack, list[Shard]] = {way: [] for way in self.ways_back}
        for table in self.tables:
            shards[table.way_back].extend(table.filled)
        return {way: Travelling(way, on_way, self.world_size) for way, on_way in shards.items()}

    def seen_from(self, rank: int) -> CollectionSharding:
        """Describe these shards as another rank sees them, without computing again what is known of them."""
        self.local()  # known once for all ranks
        other = copy.copy(self)
        object.__setattr__(other, "rank", rank)
        return other

    def named(self, table: str) -> ShardedTable:
        return self._by_name[table]

    @cached_property
    def _by_name(self) -> dict[str, ShardedTable]:
        return {sharded.table.name: sharded for sharded in self.tables}


def unsharded(tables: Sequence[TableSpec]) -> CollectionSharding:
    """Tables that are not sharded: each is one shard, on the only rank."""
    whole = [Shard(table, 0, (0, table.num_embeddings), (0, table.embedding_dim), name=table.name) for table in tables]
    placed = [ShardedTable(shard.table, Unsharded(), "fused", STAY, (shard,)) for shard in whole]
    return CollectionSharding(tuple(placed), rank=0, world_size=1)
