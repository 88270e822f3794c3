"""``recfx.plan``: TorchRec's planner for converted and for standard models, on hosts, CUDA devices and NPU pods."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from recfx.argument_types import typed
from recfx.collections.sharding.collection import sharded_collections
from recfx.errors import ConversionError, did_you_mean
from recfx.planner.candidates import Candidates
from recfx.planner.enumerator import OrderedEnumerator, is_plannable
from recfx.planner.estimates import ShardTimes
from recfx.planner.placements import replace_placements
from recfx.planner.plan_prices import PlanPrices
from recfx.planner.planned_option import QuickPartitioner
from recfx.planner.priced_plan import PricedPlan
from recfx.planner.pricing.values import not_negative, whole_number
from recfx.planner.proposers import left_out, proposers
from recfx.planner.sharder import HashEmbeddingBagCollectionSharder, planned_types, torchrec_sharders
from recfx.planner.topology import NpuTopology, check_topology, device_of, hardware_of
from recfx.replacement.replace_collections import as_converted

_NOISE = (
    "Sharding spec not found for ",  # logged for every data-parallel table, which has none
    "There is a known issue with TorchRec's dense tensor size",
)
_LOGGERS = [logging.getLogger(), logging.getLogger("torchrec.distributed.planner.storage_reservations")]


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """A context without what TorchRec's planner logs as it should be, and warns of its own default."""
    root, last = _LOGGERS[0], logging.lastResort

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_NOISE)

    handlers = [] if root.handlers or last is None else [last]  # without one, logging would configure the root for good
    root.handlers.extend(handlers)
    for logger in _LOGGERS:
        logger.addFilter(is_news)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "HeuristicalStorageReservation is known to cause issues", FutureWarning)
            yield
    finally:
        for logger in _LOGGERS:
            logger.removeFilter(is_news)
        for handler in handlers:
            root.removeHandler(handler)


@typed(ConversionError)
def plan(
    model: nn.Module,
    topology: Topology | NpuTopology,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    *,
    batch_size: int = BATCH_SIZE,
    empty_ranks: bool = False,
) -> ShardingPlan:
    """How to shard the collections of ``model``; the same arguments give the same plan in every process.

    TorchRec's planner proposes plans and places their shards by recfx's estimates; the best few of those that fit, each
    with other sharding types, are priced as ``recfx.cost`` prices them, with the constants of the topology. The plan is
    the cheapest. It is a :class:`recfx.planner.priced_plan.PricedPlan`, whose ``pricing`` also names the runner-up;
    ``recfx.explain(model, plan=plan)`` shows both. For hundreds of tables, only some of TorchRec's proposals are tried.

    No process group is needed, and the model is not changed. It may be on the meta device, and converted or not (recfx
    shards collections after conversion, pooled ones and those of sequences, so the plan may use everything that
    converted collections support). No cut leaves a rank without rows unless ``empty_ranks`` allows it; tables with an
    index are cut between buckets, and the plan says where. Other modules that TorchRec can shard are planned too,
    except for NPUs, on which TorchRec's own lookups do not run. The host memory of indexes is counted if the model is
    converted.

    Example:
        >>> from recfx.planner.topology import npu_topology
        >>> plan = recfx.plan(Model(), npu_topology(8), batch_size=4096)
        >>> plan.world_size, list(plan.plan["ebc"])
        (8, ['users'])

    Args:
        model: the model, with its collections under the names that they will have when it is sharded.
        topology: TorchRec's topology, or an :func:`recfx.planner.topology.npu_topology`.
        constraints: TorchRec's constraints, by table name. ``grid_shard`` is planned only if they ask for it.
        batch_size: samples per rank.
        empty_ranks: accept a cut that leaves ranks without rows if the constraints allow no other.

    Raises:
        ConversionError: ``plan_does_not_fit`` with TorchRec's own text, ``plan_failed``, ``unknown_table``,
            ``no_sharding_option``, ``no_collection``, ``already_sharded``, ``invalid_topology``,
            ``invalid_argument``.
        InputError: ``invalid_argument``: ``batch_size`` or a number in the constraints is none.
    """
    return _plan(model, topology, constraints, batch_size, empty_ranks)


def plan_of_collections(model: nn.Module, topology: Topology | NpuTopology) -> ShardingPlan:
    """The plan that ``plan`` makes, without the modules that recfx does not convert: they stay as they are.

    So do those that a conversion has left in ``model``.
    """
    return _plan(model, topology, with_torchrec=False)


def _plan(
    model: nn.Module,
    topology: Topology | NpuTopology,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    batch_size: int = BATCH_SIZE,
    empty_ranks: bool = False,
    *,
    with_torchrec: bool = True,
) -> ShardingPlan:
    check_topology(topology)
    whole_number(batch_size, "batch_size")
    for path in sharded_collections(model):
        raise ConversionError(
            "the collection is sharded already.",
            reason="already_sharded",
            module_path=path,
            what_to_do="make the plan from the model before it is sharded.",
        )
    pod = topology.as_cuda() if isinstance(topology, NpuTopology) else topology
    collections = as_converted(model)
    if not with_torchrec:
        here = {path: collection for path, collection in collections.items() if model.get_submodule(path) is collection}
        collections = here or collections
    sharders = planning_sharders(model, collections, with_torchrec=with_torchrec and pod is topology)
    limits = _checked_constraints(constraints)
    _check(model, sharders, pod.compute_device, limits)
    hardware, device = hardware_of(topology), device_of(topology)
    times = ShardTimes(pod, limits, collections, hardware, device, model.training)
    tables = sum(len(collection.tables) for collection in collections.values())

    bound = {table for table, limit in limits.items() if len(limit.sharding_types or ()) == 1}

    @_without_noise()
    def search(proposing: list[Proposer]) -> tuple[int, list[list[ShardingOption]]]:
        """How many plans were tried, and those to price."""
        candidates, partitioner = Candidates(pod, bound), QuickPartitioner()
        planner = EmbeddingShardingPlanner(
            topology=pod,
            batch_size=batch_size,
            enumerator=OrderedEnumerator(pod, batch_size, limits, times, empty_ranks=empty_ranks),
            proposer=proposing,
            partitioner=partitioner,
            performance_model=candidates,
            constraints=limits,
            stats=[],
            debug=False,
        )
        planner.plan(model, sharders)
        return candidates.tried, candidates.chosen(partitioner.capacity)

    try:
        proposing = proposers(pod, tables)
        try:
            tried, plans = search(proposing)
        except PlannerError:
            if not left_out(proposing):
                raise
            tried, plans = search(proposers(pod, tables, times=10))  # one of those that were left out may fit
    except PlannerError as error:
        raise _refusal(error) from error
    chosen, pricing = PlanPrices(model, collections, topology, pod, batch_size).pricing(plans, tried)
    best = to_sharding_plan(plans[chosen], pod)
    if pod is not topology:
        best = replace_placements(best, "npu", pod.local_world_size)
    return PricedPlan(best.plan, topology, pricing)


def planning_sharders(
    model: nn.Module, collections: Iterable[str], *, with_torchrec: bool
) -> list[ModuleSharder[nn.Module]]:
    """A sharder, for planning only, for each class of the ``collections`` of ``model``, which are given by their paths;
    also TorchRec's own if ``with_torchrec``.
    """
    classes = dict.fromkeys(type(model.get_submodule(path)) for path in collections)
    ours: dict[type[nn.Module], ModuleSharder[nn.Module]] = {
        kind: HashEmbeddingBagCollectionSharder(module_type=kind) for kind in classes
    }
    if not with_torchrec:
        return list(ours.values())
    # TorchRec takes the last sharder of a class, so ours must be the only one. Feature-processed collections are
    # planned as the collection inside them, which is what recfx converts.
    taken = {*ours, FeatureProcessedEmbeddingBagCollection}
    return [*ours.values(), *(sharder for sharder in torchrec_sharders() if sharder.module_type not in taken)]


_LISTS: dict[str, Callable[[Any, str], object] | None] = {
    "pooling_factors": not_negative,
    "num_poolings": not_negative,
    "batch_sizes": whole_number,
    "sharding_types": None,
    "compute_kernels": None,
}


def _checked_constraints(constraints: Mapping[str, Any] | None) -> dict[str, ParameterConstraints]:
    """The constraints by table.

    Raises:
        ConversionError: ``invalid_argument``: they are none.
        InputError: ``invalid_argument``: a number in them is none, or is too small.
    """
    by_table = dict(constraints or {})
    for table, limits in by_table.items():
        if not isinstance(limits, ParameterConstraints):
            raise _invalid_constraint(
                f"the constraints of table {table!r} are {limits!r}", "ParameterConstraints of TorchRec"
            )
        if limits.min_partition is not None:
            whole_number(limits.min_partition, f"min_partition of table {table!r}")
        for name, check in _LISTS.items():
            given = getattr(limits, name)
            if given is None and name != "pooling_factors":
                continue
            if not isinstance(given, Iterable) or isinstance(given, str):
                raise _invalid_constraint(f"{name} of table {table!r} is {given!r}", "a list, or nothing")
            for value in given:
                if check is not None:
                    check(value, f"one of {name} of table {table!r}")
    return by_table


def _invalid_constraint(message: str, instead: str) -> ConversionError:
    return ConversionError(f"{message}.", reason="invalid_argument", what_to_do=f"pass {instead}.")


def _check(
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    device: str,
    constraints: dict[str, ParameterConstraints],
) -> None:
    """Refuse what TorchRec would ignore (unknown table names), or answer with a log line and a RuntimeError."""
    by_class = {sharder.module_type: sharder for sharder in sharders}
    tables: set[str] = set()
    for path, module in model.named_modules():
        sharder = by_class.get(type(module))
        for name in () if sharder is None else sharder.shardable_parameters(module):
            tables.add(name)
            limits = constraints.get(name, ParameterConstraints())
            if not _has_option(sharder, device, limits):
                raise ConversionError(
                    f"table {name!r} cannot be sharded on {device} as its constraints say: sharding_types="
                    f"{limits.sharding_types}, compute_kernels={limits.compute_kernels}"
                    + (f", device_group={limits.device_group!r}." if limits.device_group else "."),
                    reason="no_sharding_option",
                    module_path=path,
                    what_to_do=f"use kernel 'fused' and any of {', '.join(planned_types())} ('dense': data_parallel)"
                    + (f", and no other device_group than {device!r}." if limits.device_group else "."),
                )
    if not tables:
        raise ConversionError(
            "there is no collection to shard.",
            reason="no_collection",
            what_to_do="pass a model that holds collections of TorchRec.",
        )
    unknown = sorted(constraints.keys() - tables)
    if unknown:
        raise ConversionError(
            f"constraints name {', '.join(map(repr, unknown))}, but no collection has such a table"
            f"{did_you_mean(unknown[0], tables)}.",
            reason="unknown_table",
            what_to_do=f"the tables are {', '.join(sorted(tables))}.",
        )


def _has_option(sharder: ModuleSharder[nn.Module], device: str, limits: ParameterConstraints) -> bool:
    """Whether TorchRec's planner accepts any of the sharding types and kernels that ``limits`` allows.

    It leaves tables of another device group out of the plan.
    """
    return limits.device_group in (None, "", device) and any(
        is_plannable(sharding_type, kernel)
        for sharding_type in sharder.sharding_types(device)
        for kernel in sharder.compute_kernels(sharding_type, device)
        if not limits.sharding_types or sharding_type in limits.sharding_types
        if not limits.compute_kernels or kernel in limits.compute_kernels
    )


def _refusal(error: PlannerError) -> ConversionError:
    """TorchRec's error as one of recfx's, with TorchRec's text."""
    memory = (PlannerErrorType.INSUFFICIENT_STORAGE, PlannerErrorType.STRICT_CONSTRAINTS, PlannerErrorType.PARTITION)
    if error.error_type in memory:
        return ConversionError(
            f"TorchRec's planner found no plan that fits: {error}",
            reason="plan_does_not_fit",
            what_to_do="give more devices or memory, a smaller batch_size, or constraints that allow more.",
        )
    return ConversionError(
        f"TorchRec's planner failed ({error.error_type.value}): {error}",
        reason="plan_failed",
        what_to_do="see TorchRec's text; the constraints can be changed here.",
    )
