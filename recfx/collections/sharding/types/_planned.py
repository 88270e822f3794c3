"""Reads the shards that a plan lists, and checks them as all types do."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

from torchrec.distributed.types import EnumerableShardingSpec

from recfx.collections.sharding.whole_plan import rank_of, table_error
from recfx.errors import ConversionError
from recfx.ir.shards import TablePlan


class PlannedShard(NamedTuple):
    """A rectangle of the plan: first row and the row after the last, the same for columns, and the rank."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    rank: int


def planned_shards(plan: TablePlan) -> list[PlannedShard]:
    """The shards that the plan lists, in its order.

    Raises:
        ConversionError: ``plan_invalid``: it lists none; ``plan_rank``: one is on a rank that is not there.
    """
    spec = plan.parameter.sharding_spec
    if not isinstance(spec, EnumerableShardingSpec):
        raise wrong(plan, "plan_invalid", "has no EnumerableShardingSpec that says where its shards are.")
    shards = []
    for shard in spec.shards:
        if not len(shard.shard_offsets) == len(shard.shard_sizes) == 2:
            what = f"has a shard at {shard.shard_offsets} of {shard.shard_sizes}, not of rows and columns."
            raise wrong(plan, "plan_invalid", what)
        (row, column), (rows, columns), rank = shard.shard_offsets, shard.shard_sizes, rank_of(shard)
        if rank is None:
            raise wrong(plan, "plan_invalid", f"places a shard on {shard.placement!s}, which names no rank.")
        shards.append(PlannedShard((row, row + rows), (column, column + columns), rank))
    for planned in shards:
        check_rank(plan, planned.rank)
    return shards


def column_blocks(plan: TablePlan, shards: Sequence[PlannedShard]) -> list[tuple[tuple[int, int], list[PlannedShard]]]:
    """The shards by their columns, from left to right, those of each block from top to bottom.

    Raises:
        ConversionError: ``plan_invalid``, ``plan_shape_mismatch``: some columns are on no rank.
    """
    blocks: dict[tuple[int, int], list[PlannedShard]] = {}
    for shard in shards:
        blocks.setdefault(shard.columns, []).append(shard)
    _check_tiling(plan, list(blocks), plan.table.embedding_dim, "columns")
    return [(columns, sorted(pieces, key=lambda piece: piece.rows)) for columns, pieces in sorted(blocks.items())]


def row_borders(plan: TablePlan, pieces: Sequence[PlannedShard]) -> list[int]:
    """Where the plan cuts the rows of one column block.

    Raises:
        ConversionError: ``plan_invalid``, ``plan_shape_mismatch``: some rows are on no rank.
    """
    _check_tiling(plan, [piece.rows for piece in pieces], plan.table.num_embeddings, "rows")
    return [*(piece.rows[0] for piece in pieces), plan.table.num_embeddings]


def check_rank(plan: TablePlan, rank: Any) -> None:
    """Whether there is such a rank.

    Raises:
        ConversionError: ``plan_rank``.
    """
    if not isinstance(rank, Integral):
        raise wrong(plan, "plan_rank", f"places a shard on rank {rank!r}, which is no number.")
    if not 0 <= int(rank) < plan.world_size:
        last = plan.world_size - 1
        ranks = f"ranks are 0 {'and' if last == 1 else 'to'} {last}" if last else "there is only rank 0"
        raise wrong(plan, "plan_rank", f"places a shard on rank {rank}, but {ranks}.")


def wrong(plan: TablePlan, reason: str, what: str) -> ConversionError:
    """The error of this table's plan; ``what`` says what the plan does, as the rest of the sentence."""
    return table_error(reason, plan.table.name, what, plan.path)


def _check_tiling(plan: TablePlan, ranges: list[tuple[int, int]], size: int, what: str) -> None:
    position = 0
    for begin, end in sorted(ranges):
        if begin != position:
            raise wrong(plan, "plan_invalid", f"{what} {position} to {begin} are on no rank, or on two.")
        position = end
    if position != size:
        raise wrong(plan, "plan_shape_mismatch", f"shards {position} {what}, but the table has {size}.")
