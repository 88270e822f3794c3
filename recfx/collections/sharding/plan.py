"""Reads TorchRec's plans: what the plan of a model names, and the shards of one collection, the same on all ranks."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import DataType

from recfx.collections.sharding.ranks_agree import on_all_ranks
from recfx.collections.sharding.settings import Settings, different_settings
from recfx.collections.sharding.types import SHARDING_TYPES, plan_error, table_error
from recfx.errors import ConversionError, RecfxError, type_of
from recfx.errors.argument_types import HOW
from recfx.ir.shards import CollectionSharding, ShardedTable, TablePlan
from recfx.ir.tables import TableSpec, name_shards
from recfx.optim.fused_params import NEUTRAL

_Result = TypeVar("_Result")

KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)
_LONGEST = 200  # of what an error says about one table


def read_plan(
    tables: tuple[TableSpec, ...], plan: Mapping[str, ParameterSharding], rank: int, world_size: int, path: str = ""
) -> CollectionSharding:
    """The shards of a collection. Rows of a table with an index are cut on bucket borders, into as many pieces as the
    plan has; all other cuts are the plan's own, so that row-wise checkpoints line up with TorchRec's.
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


def on_all_ranks_with_plan(
    group: dist.ProcessGroup | None, plan: ShardingPlan | None, function: Callable[[], _Result]
) -> list[_Result]:
    """Call ``function``, which checks ``plan`` or makes one, on all ranks; what each of them returned. Collective.
    ``plan``, which the user has given this rank, must name the same collections on all ranks, or be None on all.
    """

    def call() -> tuple[str, _Result]:
        result = function()
        if plan is None:
            return "no plan", result
        return f"a plan of {sorted(path for path, tables in plan.plan.items() if tables)}", result

    refused = _told(group, "")
    answers = on_all_ranks(
        group, call, lambda error: error if plan is None and isinstance(error, RecfxError) else refused(error)
    )
    other = next((rank for rank, (words, _) in enumerate(answers) if words != answers[0][0]), None)
    if other is not None:
        raise _different_plans({rank: answers[rank][0] for rank in (0, other)}, "")
    return [result for _, result in answers]


def agreed_sharding(
    group: dist.ProcessGroup | None, settings: Callable[[], Settings], read: Callable[[], CollectionSharding], path: str
) -> CollectionSharding:
    """The shards of a collection as this rank reads the plan, if all ranks have one plan and one kind of settings.
    Collective.
    """
    told, shardings = _told(group, path), list[CollectionSharding]()

    def placements() -> dict[str, str]:
        shardings.append(read())
        return {table.table.name: table.placement for table in shardings[0].tables}

    if different := _first_difference(group, settings, told):  # which may be why a rank cannot read its plan
        raise different_settings(*different, path)
    if different := _first_difference(group, placements, told):
        raise _different_plans(different[1], path)
    return shardings[0]


def _first_difference(
    group: dist.ProcessGroup | None,
    function: Callable[[], Mapping[Any, str]],
    told: Callable[[BaseException], ConversionError],
) -> tuple[Any, dict[int, str]] | None:
    """The first key under which ``function`` has something else on another rank than on rank 0, and what, by rank."""
    mine: dict[Any, str] = {}

    def digest() -> str:
        mine.update(function())
        return hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()

    digests = on_all_ranks(group, digest, told)
    other = next((rank for rank, of_rank in enumerate(digests) if of_rank != digests[0]), None)
    if other is None or group is None:
        return None
    of_ranks = on_all_ranks(group, lambda: mine if group.rank() in (0, other) else {}, told)
    first, second = of_ranks[0], of_ranks[other]
    key = next(key for key in {**first, **second} if first.get(key) != second.get(key))
    return key, {0: first.get(key, "absent"), other: second.get(key, "absent")}


def _different_plans(of_ranks: Mapping[int, str], path: str) -> ConversionError:
    where = "; ".join(f"rank {rank} has {words[:_LONGEST]}" for rank, words in of_ranks.items())
    return plan_error("ranks_have_different_plans", f"ranks have different plans: {where}.", path)


def _told(group: dist.ProcessGroup | None, path: str) -> Callable[[BaseException], ConversionError]:
    """What other ranks are told about an error: which rank has it."""
    who = f"rank {0 if group is None else group.rank()} cannot shard by its plan"
    return lambda error: plan_error("ranks_have_different_plans", f"{who}: {type(error).__name__}: {error}", path)


def _read(plan: TablePlan) -> ShardedTable:
    _check_options(plan)
    sharding_type = SHARDING_TYPES[plan.parameter.sharding_type]
    cut = sharding_type.cut(plan)
    kernel, shards = plan.parameter.compute_kernel, name_shards(cut.shards)
    way_back = cut.way_back if plan.table.is_pooled else cut.way_back.of_rows()
    return ShardedTable(plan.table, sharding_type, kernel, way_back, shards)


def _check_options(plan: TablePlan) -> None:
    sharding, table = plan.parameter, plan.table.name
    if sharding.sharding_type not in tuple(SHARDING_TYPES):  # it may be anything, also what has no hash
        what = f"is of type {sharding.sharding_type!r}; known types are {tuple(SHARDING_TYPES)}."
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
        "cache_params.prefetch_pipeline": (cache.prefetch_pipeline, NEUTRAL["prefetch_pipeline"]),
        "cache_params.multipass_prefetch_config": (cache.multipass_prefetch_config, ()),
    }
    for name in ("algorithm", "load_factor", "reserved_memory", "precision"):
        options[f"cache_params.{name}"] = getattr(cache, name), NEUTRAL[f"cache_{name}"]
    for option, (value, neutral) in options.items():
        if value is not None and value not in neutral:
            raise table_error("unsupported_plan_option", table, f"sets {option}={value!r}.", plan.path)


# What the plan of a whole model names

MOST_RANKS = 2**20
"""More than any cluster has; something is listed for each of them."""


def check_plan(plan: Any) -> None:
    """Refuse what is no plan of a whole model: a mapping from collections to mappings from tables."""
    is_plan = isinstance(plan, ShardingPlan)
    if not is_plan or not isinstance(plan.plan, Mapping):
        raise ConversionError(
            f"plan.plan is {type_of(plan.plan)}." if is_plan else f"plan is {type_of(plan)}.",
            reason="invalid_argument",
            what_to_do=HOW["plan"],
        )
    for path, tables in plan.plan.items():
        if not isinstance(tables, Mapping):
            raise plan_error("invalid_argument", f"the plan of a collection is {type_of(tables)}.", str(path))


def refuse_unknown_collections(plan: ShardingPlan, known: Collection[str]) -> None:
    """Refuse a plan that names a collection which recfx does not shard (``plan_unknown_collection``)."""
    for path in plan.plan:
        if path not in known:
            raise ConversionError(
                f"the plan names {path!r}, which is not a converted collection; the model has {sorted(known)}.",
                reason="plan_unknown_collection",
                module_path=path,
                what_to_do="make the plan from this model; modules that recfx does not convert are sharded by "
                "DistributedModelParallel(model, plan=plan, sharders=recfx.sharders()).",
            )


def plan_of_collection(plan: ShardingPlan, paths: Sequence[str]) -> Any:
    """The plan of the collection that has the names ``paths``, by table (``plan_missing_collection``)."""
    for path in paths:
        if path in plan.plan:
            return plan.plan[path]
    raise ConversionError(
        "the plan does not name this collection.",
        reason="plan_missing_collection",
        module_path=paths[0],
        what_to_do="make the plan from this model.",
    )
