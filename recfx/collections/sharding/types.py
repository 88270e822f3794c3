"""The sharding types, how each reads what a plan says of one table, and the errors for which a plan is refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torchrec.distributed.types import EnumerableShardingSpec

from recfx.collections.pieces import rank_of
from recfx.errors import ConversionError
from recfx.hashing import row_cuts
from recfx.ir.shards import Cut, ShardingType, TablePlan
from recfx.ir.tables import Shard
from recfx.ir.ways_back import ALL_TO_ALL, REDUCE_SCATTER, STAY, WayBack, two_hops

_ADVICE = {
    "invalid_argument": "pass a dict from table name to torchrec.distributed.types.ParameterSharding.",
    "plan_unknown_table": "make the plan from this model, or rename or remove the table in it.",
    "plan_missing_table": "make the plan from this model.",
    "unsupported_sharding_type": "use one of the seven types of torchrec.distributed.types.ShardingType.",
    "unsupported_compute_kernel": "constrain the planner to compute_kernels=['fused', 'dense'].",
    "unsupported_plan_option": "leave it out of the constraints.",
    "plan_shape_mismatch": "pass the model that the plan was made from: hashing may have given the table more rows.",
    "plan_rank": "make the plan for this number of ranks.",
    "plan_invalid": "make the plan with torchrec's planner, or construct_module_sharding_plan.",
    "ranks_have_different_plans": "pass the same plan on every rank: make it on one of them and broadcast it, as "
    "collective_plan of TorchRec's planner does, or make it from the same arguments everywhere.",
}


def plan_error(reason: str, message: str, path: str) -> ConversionError:
    """The error of a plan; ``path`` is the fully qualified name of the collection."""
    return ConversionError(message, reason=reason, module_path=path, what_to_do=_ADVICE[reason])


def table_error(reason: str, table: str, what: str, path: str) -> ConversionError:
    """The error of the plan of one table; ``what`` says what the plan does, as the rest of the sentence."""
    return plan_error(reason, f"the plan of table {table!r} {what}", path)


def _wrong(plan: TablePlan, reason: str, what: str) -> ConversionError:
    return table_error(reason, plan.table.name, what, plan.path)


def _check_rank(plan: TablePlan, rank: Any) -> None:
    if not isinstance(rank, Integral):
        raise _wrong(plan, "plan_rank", f"places a shard on rank {rank!r}, which is no number.")
    if not 0 <= int(rank) < plan.world_size:
        raise _wrong(plan, "plan_rank", f"places a shard on rank {rank}, but ranks are 0 to {plan.world_size - 1}.")


def _check_tiling(plan: TablePlan, ranges: list[tuple[int, int]], size: int, what: str) -> None:
    position = 0
    for begin, end in sorted(ranges):
        if begin != position:
            raise _wrong(plan, "plan_invalid", f"{what} {position} to {begin} are on no rank, or on two.")
        position = end
    if position != size:
        raise _wrong(plan, "plan_shape_mismatch", f"shards {position} {what}, but the table has {size}.")


def column_blocks(plan: TablePlan) -> list[tuple[tuple[int, int], list[Shard]]]:
    """The shards that the plan lists by their columns, from left to right, those of each block from top to bottom."""
    spec = plan.parameter.sharding_spec
    if not isinstance(spec, EnumerableShardingSpec):
        raise _wrong(plan, "plan_invalid", "has no EnumerableShardingSpec that says where its shards are.")
    blocks: dict[tuple[int, int], list[Shard]] = {}
    for shard in spec.shards:
        if not len(shard.shard_offsets) == len(shard.shard_sizes) == 2:
            what = f"has a shard at {shard.shard_offsets} of {shard.shard_sizes}, not of rows and columns."
            raise _wrong(plan, "plan_invalid", what)
        (row, column), (rows, columns), rank = shard.shard_offsets, shard.shard_sizes, rank_of(shard)
        if rank is None:
            raise _wrong(plan, "plan_invalid", f"places a shard on {shard.placement!s}, which names no rank.")
        _check_rank(plan, rank)
        planned = Shard(plan.table, rank, (row, row + rows), (column, column + columns))
        blocks.setdefault(planned.columns, []).append(planned)
    _check_tiling(plan, list(blocks), plan.table.embedding_dim, "columns")
    return [(columns, sorted(pieces, key=lambda piece: piece.rows)) for columns, pieces in sorted(blocks.items())]


def row_borders(plan: TablePlan, pieces: Sequence[Shard]) -> list[int]:
    """Where the plan cuts the rows of one column block."""
    _check_tiling(plan, [piece.rows for piece in pieces], plan.table.num_embeddings, "rows")
    return [*(piece.rows[0] for piece in pieces), plan.table.num_embeddings]


def _whole(plan: TablePlan, rank: int, columns: tuple[int, int] | None = None) -> Shard:
    return Shard(plan.table, rank, (0, plan.table.num_embeddings), columns or (0, plan.table.embedding_dim))


@dataclass(frozen=True)
class DataParallel(ShardingType):
    """A replica per rank. Every rank gets all ids and pools all ranks' samples, so that replicas stay equal."""

    name = "data_parallel"
    is_replicated = True
    kernels = ("dense",)  # as TorchRec's planner counts it, whatever optimizer trains the table
    unplanned_kernels = ()

    def cut(self, plan: TablePlan) -> Cut:
        """A replica on each rank; a plan that lists ranks has to list these."""
        listed = plan.parameter.ranks
        named: list[object] = list(listed) if isinstance(listed, (list, tuple)) else []
        for rank in named:
            _check_rank(plan, rank)
        if named and len(set(named)) != plan.world_size:
            raise _wrong(plan, "plan_rank", f"has copies on ranks {named}, but there are {plan.world_size} ranks.")
        return Cut([_whole(plan, rank) for rank in range(plan.world_size)], STAY)


@dataclass(frozen=True)
class ColumnWise(ShardingType):
    """Each block of columns is on one rank, which may have several; the columns come back in one all-to-all."""

    name = "column_wise"

    def cut(self, plan: TablePlan) -> Cut:
        """One shard per column block."""
        shards = []
        for columns, pieces in column_blocks(plan):
            if len(pieces) > 1 or pieces[0].rows[0] != 0:
                raise _wrong(plan, "plan_invalid", "cuts rows, which this type does not do.")
            if not plan.table.has_index:
                row_borders(plan, pieces)
            shards.append(_whole(plan, pieces[0].rank, columns))
        return Cut(shards, ALL_TO_ALL)


@dataclass(frozen=True)
class TableColumnWise(ColumnWise):
    """Which ranks share a host matters only to the planner that chose them."""

    name = "table_column_wise"


@dataclass(frozen=True)
class TableWise(ColumnWise):
    """One shard. A plan may name only its rank."""

    name = "table_wise"

    def cut(self, plan: TablePlan) -> Cut:
        """As the sharding spec says, or else the rank."""
        ranks, spec = plan.parameter.ranks, plan.parameter.sharding_spec
        if isinstance(spec, EnumerableShardingSpec) or not isinstance(ranks, (list, tuple)) or len(ranks) != 1:
            return super().cut(plan)
        _check_rank(plan, ranks[0])
        return Cut([_whole(plan, ranks[0])], ALL_TO_ALL)


@dataclass(frozen=True)
class RowWise(ShardingType):
    """Each rank sums what it has of a bag; the sums are added up on the way back."""

    name = "row_wise"
    cuts_rows = True

    def cut(self, plan: TablePlan) -> Cut:
        """The pieces of each column block, by row."""
        shards: list[Shard] = []
        for columns, pieces in column_blocks(plan):
            if len({piece.rank for piece in pieces}) != len(pieces):
                raise _wrong(plan, "plan_invalid", "places several pieces of the same columns on one rank.")
            if plan.table.has_index and plan.table.hashing is not None:
                borders = row_cuts(plan.table.hashing, len(pieces))
            else:
                borders = row_borders(plan, pieces)
            for number, piece in enumerate(pieces):
                rows = borders[number], borders[number + 1]
                shards.append(Shard(plan.table, piece.rank, rows, columns, number if len(pieces) > 1 else -1))
        return Cut(shards, self.way_back(plan, shards))

    def way_back(self, plan: TablePlan, shards: list[Shard]) -> WayBack:
        """How pooled rows travel back."""
        return REDUCE_SCATTER


@dataclass(frozen=True)
class TableRowWise(RowWise):
    """The ranks of the host first add up their sums, and then send them to the other hosts."""

    name = "table_row_wise"

    def way_back(self, plan: TablePlan, shards: list[Shard]) -> WayBack:
        """One hop is enough if a host has all ranks, or only one."""
        by_columns: dict[tuple[int, int], list[int]] = {}
        for shard in shards:
            by_columns.setdefault(shard.columns, []).append(shard.rank)
        local_size = min(map(len, by_columns.values()))
        hosts = all(ranks == list(range(ranks[0], ranks[0] + local_size)) for ranks in by_columns.values())
        aligned = all(ranks[0] % local_size == 0 for ranks in by_columns.values())
        if not hosts or not aligned or plan.world_size % local_size:
            raise _wrong(plan, "plan_invalid", "does not cut the rows over the ranks of one host, in order.")
        if local_size == plan.world_size:
            return REDUCE_SCATTER
        return ALL_TO_ALL if local_size == 1 else two_hops(local_size)


@dataclass(frozen=True)
class GridShard(TableRowWise):
    """Each block of columns is sharded as ``table_row_wise`` shards the whole table."""

    name = "grid_shard"


SHARDING_TYPES: dict[str, ShardingType] = {
    of_type.name: of_type()
    for of_type in (DataParallel, TableWise, ColumnWise, TableColumnWise, RowWise, TableRowWise, GridShard)
}
"""By name, in the order in which the planner tries equally good types."""
