"""From TorchRec's plan of one collection to shards; everything that a plan can be refused for is here."""

from __future__ import annotations

from collections.abc import Mapping

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardMetadata
from torchrec.modules.embedding_configs import DataType

from recfx.errors import ConversionError
from recfx.hashing.slicing import row_cuts
from recfx.ir.shards import (
    COLUMN_WISE,
    DATA_PARALLEL,
    GRID_SHARD,
    ROW_WISE,
    TABLE_COLUMN_WISE,
    TABLE_ROW_WISE,
    TABLE_WISE,
    CollectionSharding,
    Shard,
    ShardedTable,
    name_shards,
)
from recfx.ir.tables import TableSpec

KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)
CUT_BY_ROWS = (ROW_WISE, TABLE_ROW_WISE, GRID_SHARD)
_TYPES = (DATA_PARALLEL, TABLE_WISE, COLUMN_WISE, TABLE_COLUMN_WISE, *CUT_BY_ROWS)


def read_plan(
    tables: tuple[TableSpec, ...], plan: Mapping[str, ParameterSharding], rank: int, world_size: int, path: str = ""
) -> CollectionSharding:
    """The shards of a collection.

    Rows of a table with an index are cut on bucket borders, into as many pieces as the plan has; all other cuts are the
    plan's own, so that row-wise checkpoints line up with TorchRec's.

    Args:
        tables: of the collection, in order.
        plan: sharding of each of them.
        rank: this one.
        world_size: number of ranks.
        path: fully qualified name of the collection, for messages.

    Raises:
        ConversionError: ``invalid_argument``, ``plan_unknown_table``, ``plan_missing_table``,
            ``unsupported_sharding_type``, ``unsupported_compute_kernel``, ``unsupported_plan_option``,
            ``plan_shape_mismatch``, ``plan_rank``, ``plan_invalid``.
    """
    _check_types(plan, path)
    names = [table.name for table in tables]
    known = set(names)
    unknown = [name for name in plan if name not in known]
    if unknown:
        raise _error("plan_unknown_table", f"the plan names table {unknown[0]!r}, the collection has {names}.", path)
    missing = [name for name in names if name not in plan]
    if missing:
        raise _error("plan_missing_table", f"the plan says nothing of table {missing[0]!r}.", path)
    sharded = tuple(_Reader(table, plan[table.name], world_size, path).read() for table in tables)
    local_sizes = {len(each.row_borders()) - 1 for each in sharded if each.group == TABLE_ROW_WISE}
    if len(local_sizes) > 1:
        raise _error("plan_invalid", f"hosts have {sorted(local_sizes)} ranks in the plans of different tables.", path)
    return CollectionSharding(sharded, rank, world_size, local_sizes.pop() if local_sizes else 1)


def _check_types(plan: object, path: str) -> None:
    if not isinstance(plan, Mapping):
        raise _error("invalid_argument", f"the plan of a collection is a {type(plan).__name__}.", path)
    for table, sharding in plan.items():
        if not isinstance(sharding, ParameterSharding):
            raise _error("invalid_argument", f"the plan of table {table!r} is a {type(sharding).__name__}.", path)


class _Reader:
    """Reads the plan of one table."""

    def __init__(self, table: TableSpec, sharding: ParameterSharding, world_size: int, path: str) -> None:
        self.table, self.sharding, self.world_size, self.path = table, sharding, world_size, path
        self.planned_borders: tuple[int, ...] = ()

    def read(self) -> ShardedTable:
        kind = self.sharding.sharding_type
        self._check_options()
        if kind == DATA_PARALLEL:
            shards = [self._shard(rank, self._all_rows, self._all_columns) for rank in range(self.world_size)]
        else:
            shards = self._cut()
        kernel = self.sharding.compute_kernel
        group = self._group(shards)
        return ShardedTable(self.table, kind, kernel, group, name_shards(shards), self.planned_borders)

    @property
    def _all_rows(self) -> tuple[int, int]:
        return 0, self.table.num_embeddings

    @property
    def _all_columns(self) -> tuple[int, int]:
        return 0, self.table.embedding_dim

    def _shard(self, rank: int, rows: tuple[int, int], columns: tuple[int, int], piece: int = -1) -> Shard:
        return Shard(self.table, rank, rows, columns, piece)

    def _cut(self) -> list[Shard]:
        blocks: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # of columns: first row, rows, rank
        for (row, column), (rows, width), rank in self._planned():
            if not 0 <= rank < self.world_size:
                raise self._error("plan_rank", f"places a shard on rank {rank}, there are {self.world_size}.")
            blocks.setdefault((column, column + width), []).append((row, rows, rank))
        self._check_tiling(list(blocks), self.table.embedding_dim, "columns")
        shards = []
        for columns, pieces in sorted(blocks.items()):
            if self.sharding.sharding_type not in CUT_BY_ROWS:
                if len(pieces) > 1 or pieces[0][0] != 0:
                    raise self._error("plan_invalid", "cuts rows, which this type does not do.")
                self._check_rows([(row, row + rows) for row, rows, _ in pieces])
                shards.append(self._shard(pieces[0][2], self._all_rows, columns))
                continue
            if len({rank for _, _, rank in pieces}) != len(pieces):
                raise self._error("plan_invalid", "places several pieces of the same columns on one rank.")
            borders = self._row_borders(pieces)
            self.planned_borders = (*(row for row, _, _ in pieces), pieces[-1][0] + pieces[-1][1])
            for piece, (_, _, rank) in enumerate(pieces):
                cut = piece if len(pieces) > 1 else -1
                shards.append(self._shard(rank, (borders[piece], borders[piece + 1]), columns, cut))
        return shards

    def _planned(self) -> list[tuple[list[int], list[int], int]]:
        """Offsets, sizes and rank of each planned shard."""
        spec, ranks = self.sharding.sharding_spec, self.sharding.ranks
        if isinstance(spec, EnumerableShardingSpec):
            return [(shard.shard_offsets, shard.shard_sizes, self._rank_of(shard)) for shard in spec.shards]
        if self.sharding.sharding_type == TABLE_WISE and ranks and len(ranks) == 1:
            return [([0, 0], [self.table.num_embeddings, self.table.embedding_dim], ranks[0])]
        raise self._error("plan_invalid", "has no EnumerableShardingSpec that says where its shards are.")

    def _rank_of(self, shard: ShardMetadata) -> int:
        placement = shard.placement
        rank = getattr(placement, "rank", None)
        found = rank() if callable(rank) else None
        if found is None:
            raise self._error("plan_invalid", f"places a shard on {placement!s}, which names no rank.")
        return int(found)

    def _row_borders(self, pieces: list[tuple[int, int, int]]) -> list[int]:
        if self.table.has_index and self.table.hashing is not None:
            return row_cuts(self.table.hashing, len(pieces))
        self._check_rows([(row, row + rows) for row, rows, _ in pieces])
        return [*(row for row, _, _ in pieces), self.table.num_embeddings]

    def _check_rows(self, ranges: list[tuple[int, int]]) -> None:
        if not self.table.has_index:
            self._check_tiling(ranges, self.table.num_embeddings, "rows")

    def _check_tiling(self, ranges: list[tuple[int, int]], size: int, what: str) -> None:
        position = 0
        for begin, end in sorted(ranges):
            if begin != position:
                raise self._error("plan_invalid", f"{what} {position} to {begin} are on no rank, or on two.")
            position = end
        if position != size:
            raise self._error("plan_shape_mismatch", f"shards {position} {what}, the table has {size}.")

    def _group(self, shards: list[Shard]) -> str:
        """How pooled rows travel: a host of all ranks, or of one, makes one hop of two."""
        kind = self.sharding.sharding_type
        if kind in (DATA_PARALLEL, ROW_WISE):
            return kind
        if kind not in (TABLE_ROW_WISE, GRID_SHARD):
            return TABLE_WISE
        by_columns: dict[tuple[int, int], list[int]] = {}
        for shard in shards:
            by_columns.setdefault(shard.columns, []).append(shard.rank)
        sizes = {len(ranks) for ranks in by_columns.values()}
        local_size = min(sizes)
        hosts = all(ranks == list(range(ranks[0], ranks[0] + local_size)) for ranks in by_columns.values())
        aligned = all(ranks[0] % local_size == 0 for ranks in by_columns.values())
        if len(sizes) > 1 or not hosts or not aligned or self.world_size % local_size:
            raise self._error("plan_invalid", "does not cut the rows over the ranks of one host, in order.")
        return ROW_WISE if local_size == self.world_size else TABLE_WISE if local_size == 1 else TABLE_ROW_WISE

    def _check_options(self) -> None:
        sharding = self.sharding
        if sharding.sharding_type not in _TYPES:
            raise self._error("unsupported_sharding_type", f"is of type {sharding.sharding_type!r}; known: {_TYPES}.")
        if sharding.compute_kernel not in KERNELS:
            raise self._error(
                "unsupported_compute_kernel", f"asks for kernel {sharding.compute_kernel!r}; there are {KERNELS}."
            )
        options = {
            "stochastic_rounding": (sharding.stochastic_rounding, (None, False)),
            "output_dtype": (sharding.output_dtype, (None, DataType.FP32)),
            "key_value_params": (sharding.key_value_params, (None,)),
        }
        for option, (value, neutral) in options.items():
            if value not in neutral:
                raise self._error("unsupported_plan_option", f"sets {option}={value!r}.")

    def _error(self, reason: str, what: str) -> ConversionError:
        return _error(reason, f"the plan of table {self.table.name!r} {what}", self.path)


_ADVICE = {
    "invalid_argument": "pass a dict from table name to torchrec.distributed.types.ParameterSharding.",
    "plan_unknown_table": "make the plan from this model, or take the table out of it.",
    "plan_missing_table": "make the plan from this model.",
    "unsupported_sharding_type": "use one of the seven types of torchrec.distributed.types.ShardingType.",
    "unsupported_compute_kernel": "constrain the planner to compute_kernels=['fused', 'dense'].",
    "unsupported_plan_option": "leave it out of the constraints.",
    "plan_shape_mismatch": "make the plan from the converted model: hashing may have given the table more rows.",
    "plan_rank": "make the plan for this number of ranks.",
    "plan_invalid": "make the plan with torchrec's planner, or construct_module_sharding_plan.",
}


def _error(reason: str, message: str, path: str) -> ConversionError:
    return ConversionError(message, reason=reason, module_path=path, what_to_do=_ADVICE[reason])
