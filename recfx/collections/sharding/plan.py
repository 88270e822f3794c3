"""Turns TorchRec's plan of one collection into shards: the part that all sharding types share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import CacheParams, ParameterSharding
from torchrec.modules.embedding_configs import DataType

from recfx.collections.sharding.types import type_named, type_names
from recfx.collections.sharding.whole_plan import plan_error, table_error
from recfx.errors import type_of
from recfx.ir.shard import name_shards
from recfx.ir.shards import CollectionSharding, ShardedTable, TablePlan
from recfx.ir.tables import TableSpec
from recfx.optim.fused_params import NEUTRAL

KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)


def read_plan(
    tables: tuple[TableSpec, ...], plan: Mapping[str, ParameterSharding], rank: int, world_size: int, path: str = ""
) -> CollectionSharding:
    """The shards of a collection.

    Rows of a table with an index are cut on bucket borders, into as many pieces as the plan has; all other cuts are the
    plan's own, so that row-wise checkpoints line up with TorchRec's.

    Raises:
        ConversionError: ``invalid_argument``, ``plan_unknown_table``, ``plan_missing_table``,
            ``unsupported_sharding_type``, ``unsupported_compute_kernel``, ``unsupported_plan_option``,
            ``plan_shape_mismatch``, ``plan_rank``, ``plan_invalid``.
    """
    if not isinstance(plan, Mapping):
        raise plan_error("invalid_argument", f"the plan of a collection is {type_of(plan)}.", path)
    for table, sharding in plan.items():
        if not isinstance(sharding, ParameterSharding):
            raise plan_error("invalid_argument", f"the plan of table {table!r} is {type_of(sharding)}.", path)
    names = [table.name for table in tables]
    known = set(names)
    unknown = [name for name in plan if name not in known]
    missing = [name for name in names if name not in plan]
    if unknown:
        lacks = f" and lacks {missing[0]!r}: was it renamed?" if missing else ", which the collection does not have."
        raise plan_error("plan_unknown_table", f"the plan names table {unknown[0]!r}{lacks}", path)
    if missing:
        raise plan_error("plan_missing_table", f"the plan does not name table {missing[0]!r}.", path)
    # Hashing of shards is not elided, so nothing is known of their ids.
    whole = [replace(table, id_range=None) for table in tables]
    sharded = tuple(_read(TablePlan(table, plan[table.name], world_size, path)) for table in whole)
    local_sizes = {table.way_back.local_size for table in sharded} - {1}
    if len(local_sizes) > 1:
        what = f"hosts have {sorted(local_sizes)} ranks in the plans of different tables."
        raise plan_error("plan_invalid", what, path)
    return CollectionSharding(sharded, rank, world_size)


def _read(plan: TablePlan) -> ShardedTable:
    """The plan of one table."""
    _check_options(plan)
    sharding_type = type_named(plan.parameter.sharding_type)
    cut = sharding_type.cut(plan)
    kernel, shards = plan.parameter.compute_kernel, name_shards(cut.shards)
    way_back = cut.way_back if plan.table.is_pooled else cut.way_back.of_rows()
    return ShardedTable(plan.table, sharding_type, kernel, way_back, shards, cut.planned_borders)


def _check_options(plan: TablePlan) -> None:
    sharding, table = plan.parameter, plan.table.name
    if sharding.sharding_type not in type_names():
        what = f"is of type {sharding.sharding_type!r}; known types are {type_names()}."
        raise table_error("unsupported_sharding_type", table, what, plan.path)
    if sharding.compute_kernel not in KERNELS:
        what = f"asks for kernel {sharding.compute_kernel!r}; known kernels are {KERNELS}."
        raise table_error("unsupported_compute_kernel", table, what, plan.path)
    cache = sharding.cache_params or CacheParams()
    options: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "stochastic_rounding": (sharding.stochastic_rounding, NEUTRAL["stochastic_rounding"]),
        "output_dtype": (sharding.output_dtype, (DataType.FP32,)),
        "key_value_params": (sharding.key_value_params, ()),
        "bounds_check_mode": (sharding.bounds_check_mode, NEUTRAL["bounds_check_mode"]),
        "cache_params.algorithm": (cache.algorithm, NEUTRAL["cache_algorithm"]),
        "cache_params.load_factor": (cache.load_factor, NEUTRAL["cache_load_factor"]),
        "cache_params.reserved_memory": (cache.reserved_memory, NEUTRAL["cache_reserved_memory"]),
        "cache_params.precision": (cache.precision, NEUTRAL["cache_precision"]),
        "cache_params.prefetch_pipeline": (cache.prefetch_pipeline, NEUTRAL["prefetch_pipeline"]),
        "cache_params.multipass_prefetch_config": (cache.multipass_prefetch_config, ()),
    }
    for option, (value, neutral) in options.items():
        if value is not None and value not in neutral:
            raise table_error("unsupported_plan_option", table, f"sets {option}={value!r}.", plan.path)
