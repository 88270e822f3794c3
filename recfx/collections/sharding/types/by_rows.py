"""The types that cut rows: ``row_wise``, ``table_row_wise`` and ``grid_shard``."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.collections.sharding.types._planned import column_blocks, planned_shards, row_borders, wrong
from recfx.hashing import row_cuts
from recfx.ir.shards import Cut, ShardingType, TablePlan
from recfx.ir.tables import Shard
from recfx.ir.ways_back import AllToAllBack, ReduceScatterBack, TwoHops, WayBack


def cut_rows(plan: TablePlan) -> tuple[list[Shard], tuple[int, ...]]:
    """The pieces of each column block, and where the plan cuts the rows.

    Raises:
        ConversionError: ``plan_invalid``, ``plan_rank``, ``plan_shape_mismatch``.
    """
    shards: list[Shard] = []
    planned: tuple[int, ...] = ()
    for columns, pieces in column_blocks(plan, planned_shards(plan)):
        if len({piece.rank for piece in pieces}) != len(pieces):
            raise wrong(plan, "plan_invalid", "places several pieces of the same columns on one rank.")
        if plan.table.has_index and plan.table.hashing is not None:
            borders = row_cuts(plan.table.hashing, len(pieces))
        else:
            borders = row_borders(plan, pieces)
        planned = (*(piece.rows[0] for piece in pieces), pieces[-1].rows[1])
        for number, piece in enumerate(pieces):
            rows = borders[number], borders[number + 1]
            shards.append(Shard(plan.table, piece.rank, rows, columns, number if len(pieces) > 1 else -1))
    return shards, planned


def back_from_hosts(plan: TablePlan, shards: list[Shard]) -> WayBack:
    """The way back for rows that are cut within hosts; if a host has all ranks, or only one, one hop is enough.

    Raises:
        ConversionError: ``plan_invalid``: the pieces of a column block are not on the ranks of one host, in order.
    """
    by_columns: dict[tuple[int, int], list[int]] = {}
    for shard in shards:
        by_columns.setdefault(shard.columns, []).append(shard.rank)
    local_size = min(map(len, by_columns.values()))
    hosts = all(ranks == list(range(ranks[0], ranks[0] + local_size)) for ranks in by_columns.values())
    aligned = all(ranks[0] % local_size == 0 for ranks in by_columns.values())
    if not hosts or not aligned or plan.world_size % local_size:
        raise wrong(plan, "plan_invalid", "does not cut the rows over the ranks of one host, in order.")
    if local_size == plan.world_size:
        return ReduceScatterBack()
    return AllToAllBack() if local_size == 1 else TwoHops(local_size)


@dataclass(frozen=True)
class RowWise(ShardingType):
    """Each rank sums what it has of a bag; the sums are added up on the way back."""

    name = "row_wise"
    cuts_rows = True

    def cut(self, plan: TablePlan) -> Cut:
        """One piece of the rows per rank."""
        shards, planned = cut_rows(plan)
        return Cut(shards, ReduceScatterBack(), planned)


@dataclass(frozen=True)
class TableRowWise(ShardingType):
    """The ranks of the host first add up their sums, and then send them to the other hosts."""

    name = "table_row_wise"
    cuts_rows = True

    def cut(self, plan: TablePlan) -> Cut:
        """One piece of the rows per rank of the host."""
        shards, planned = cut_rows(plan)
        return Cut(shards, back_from_hosts(plan, shards), planned)


@dataclass(frozen=True)
class GridShard(TableRowWise):
    """Each block of columns is sharded as ``table_row_wise`` shards the whole table."""

    name = "grid_shard"
