"""``recfx.plan``: plans for converted and for standard models, on hosts, CUDA devices and NPU pods; and the sharding by
a plan for ``recfx.convert``.

The search space, the estimates, the memory that is set aside and the places of shards are those of TorchRec's planner;
the choice is recfx's. Its class is not used: it hashes, copies and adds up all shards for each proposal.
"""

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from recfx.collections.collection import UnshardedCollection, unsharded_collections
from recfx.collections.converted_collection import collections_by_prefix
from recfx.collections.sharding.collection import ShardedCollection, sharded_collections
from recfx.collections.sharding.plan import on_all_ranks_with_plan, plan_of_collection, refuse_unknown_collections
from recfx.collections.sharding.shard import shard_collection
from recfx.errors import ConversionError, did_you_mean
from recfx.errors.argument_types import typed
from recfx.models.replace_collections import as_converted
from recfx.planner.priced_plan import PricedPlan, world_size_of
from recfx.planner.pricing.graph_prices import ModelPrices
from recfx.planner.pricing.node_facts import Values, not_negative, shares_of, whole_number
from recfx.planner.pricing.step_price import planned_by, price, price_step
from recfx.planner.pricing.work import LENGTH, Totals, counted, in_time, step_text
from recfx.planner.search import Placed, ShardingOptions, busy, is_plannable, no_sharding_option, plans_to_price
from recfx.planner.sharder import HashEmbeddingBagCollectionSharder, torchrec_sharders
from recfx.planner.topology import check_topology, device_of, device_of_tables, hardware_of, on_npus, plain_topology

RESERVED = 0.15
"""The share of each device's memory that TorchRec's planner sets aside by default."""


@typed(ConversionError)
def plan(
    model: nn.Module,
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    *,
    batch_size: int = BATCH_SIZE,
    empty_ranks: bool = False,
) -> ShardingPlan:
    """How to shard the collections of ``model``; the same arguments give the same plan in every process.

    TorchRec's proposals are tried, with shards placed by TorchRec's partitioner and estimates; the best few of those
    that fit, each with other sharding types, are priced as ``recfx.cost`` prices them, with the constants of the
    topology. The plan is the cheapest. It is a :class:`recfx.planner.priced_plan.PricedPlan`, whose ``price`` names the
    runner-up, too; ``recfx.explain(model, plan=plan)`` shows both. For hundreds of tables, only some are tried.

    No process group is needed, and the model, which may be on the meta device and converted or not, is not changed. No
    cut leaves a rank without rows unless ``empty_ranks`` allows it; tables with an index are cut between buckets, and
    the plan says where. Other modules that TorchRec can shard are planned too, except for NPUs, on which TorchRec's own
    lookups do not run. The host memory of indexes is counted if the model is converted.

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
        ConversionError: ``plan_does_not_fit`` with TorchRec's own text, ``unknown_table``,
            ``no_sharding_option``, ``no_collection``, ``already_sharded``, ``invalid_topology``,
            ``invalid_argument``.
        InputError: ``invalid_argument``: ``batch_size`` is none.
    """
    return make_plan(model, topology, constraints, batch_size, empty_ranks)


def make_plan(
    model: nn.Module,
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    batch_size: int = BATCH_SIZE,
    empty_ranks: bool = False,
    *,
    with_torchrec: bool = True,
) -> ShardingPlan:
    """The plan of ``plan``; without TorchRec, also without what a conversion has left in ``model``."""
    check_topology(topology)
    whole_number(batch_size, "batch_size")
    for path in sharded_collections(model):
        raise ConversionError(
            "the collection is sharded already.",
            reason="already_sharded",
            module_path=path,
            what_to_do="make the plan from the model before it is sharded.",
        )
    is_npu = device_of(topology) == "npu"
    collections = as_converted(model)
    if not with_torchrec:
        here = {path: collection for path, collection in collections.items() if model.get_submodule(path) is collection}
        collections = here or collections
    sharders = planning_sharders(model, collections, with_torchrec=with_torchrec and not is_npu)
    limits = dict(constraints or {})
    _check_constraints(limits, model, sharders, topology.compute_device)
    bound = {table for table, limit in limits.items() if len(limit.sharding_types or ()) == 1}
    enumerator = ShardingOptions(topology, batch_size, limits, empty_ranks)
    try:
        options = enumerator.enumerate(model, sharders)
        capacity = _capacity(topology, batch_size, model, sharders, limits)
        tried, plans = plans_to_price(options, capacity, bound)
    except PlannerError as error:
        raise ConversionError(
            f"no plan fits: {error}",
            reason="plan_does_not_fit",
            what_to_do="give more devices or memory, a smaller batch_size, or constraints that allow more.",
        ) from error
    values = _values(collections, limits, batch_size, topology.world_size)
    cheapest, seconds, words = _cheapest(model, collections, topology, values, plans, tried)
    best = to_sharding_plan(cheapest.assigned(), topology)
    if is_npu:
        on_npus(best, topology.local_world_size)
    return PricedPlan(best.plan, int(topology.world_size), topology, seconds, words)


def _capacity(
    topology: Topology,
    batch_size: int,
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    limits: dict[str, ParameterConstraints],
) -> Topology:
    """The ranks with the memory that TorchRec's planner leaves to tables, without its warnings of its own default."""
    logger = logging.getLogger("torchrec.distributed.planner.storage_reservations")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            reservation = HeuristicalStorageReservation(RESERVED)
            return reservation.reserve(topology, batch_size, model, sharders, limits)
    finally:
        logger.disabled = before


def _cheapest(
    model: nn.Module,
    collections: Mapping[str, UnshardedCollection],
    topology: Topology,
    values: Values,
    plans: Sequence[Placed],
    tried: int,
) -> tuple[Placed, float, str]:
    """The cheapest of the plans as ``recfx.cost`` prices them, its seconds, and how it was chosen of so many."""
    hardware, device = hardware_of(topology), device_of(topology)
    trains = model.training
    dense = ModelPrices(trains).rest(model, list(collections.values()), topology.world_size)
    rest = Totals.of(price(node, values, hardware) for node in dense)

    def priced(plan: Placed) -> tuple[float, str]:
        options = plan.assigned()
        ours = [option for option in options if option.path in collections]
        others = [option for option in options if option.path not in collections]  # which TorchRec rates
        tables: Mapping[str, Any] = to_sharding_plan(ours, topology).plan
        planned = [
            planned_by(collections[path], of_tables, topology.world_size, device, path)
            for path, of_tables in tables.items()
        ]
        _, parts = price_step(planned, trains, values, hardware, rest)
        seconds = sum(parts.values()) + float(busy(others, topology.world_size).max()) / 1e3
        return seconds, counted(one.sharding_type for one in options)

    prices = [priced(plan) for plan in plans]
    best = min(prices)
    lengths = {name: float(length) for name, length in values.lengths.items()}
    step = step_text(trains, hardware.name, values.batch, lengths, topology.world_size)
    text, tried = f"{best[1]}, {in_time(best[0])} predicted for a {step}", max(tried, len(plans))
    others = [one for one in prices if one != best]
    if others:
        seconds, types = min(others)
        runner_up = f"the runner-up ({types}) takes {in_time(seconds)}."
        words = f"the cheapest of the {len(plans)} best of {tried:,} plans: {text}; {runner_up}"
    elif tried > 1:
        words = f"the best of {tried:,}: {text}."
    else:
        words = f"the only one that TorchRec's planner found within the constraints and the memory: {text}."
    return plans[prices.index(best)], best[0], words


def _values(
    collections: Mapping[str, UnshardedCollection],
    limits: Mapping[str, ParameterConstraints],
    batch_size: int,
    world_size: int,
) -> Values:
    """The batch that TorchRec's constraints describe."""
    tables, lengths = [table for part in collections.values() for table in part.tables], dict[str, float]()
    for table in tables:
        factors = limits.get(table.name, ParameterConstraints()).pooling_factors or ()
        for feature, length in zip(table.feature_names, chain(factors, repeat(LENGTH)), strict=False):
            lengths[feature] = max(lengths.get(feature, 0.0), float(length))
    names = [*lengths, *(name for table in tables for name in table.sent_lengths)]
    return Values(batch_size, world_size, lengths, names, shares_of(tables))


def planning_sharders(
    model: nn.Module, collections: Iterable[str], *, with_torchrec: bool
) -> list[ModuleSharder[nn.Module]]:
    """A sharder for each class of the collections at these paths, and TorchRec's own if ``with_torchrec``."""
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


def _check_constraints(
    constraints: Mapping[str, Any], model: nn.Module, sharders: list[ModuleSharder[nn.Module]], device: str
) -> None:
    """Refuse what is no constraint, and what TorchRec would ignore or answer with a log line and a RuntimeError."""
    by_class = {sharder.module_type: sharder for sharder in sharders}
    sharded = [
        (name, path, by_class[type(module)])
        for path, module in model.named_modules()
        if type(module) in by_class
        for name in by_class[type(module)].shardable_parameters(module)
    ]
    if not sharded:
        raise ConversionError(
            "there is no collection to shard.",
            reason="no_collection",
            what_to_do="pass a model that holds collections of TorchRec.",
        )
    for table, limits in constraints.items():
        if not isinstance(limits, ParameterConstraints):
            raise ConversionError(
                f"the constraints of table {table!r} are {limits!r}.",
                reason="invalid_argument",
                what_to_do="pass ParameterConstraints.",
            )
        if limits.min_partition is not None:
            whole_number(limits.min_partition, f"min_partition of table {table!r}")
        for name in ("pooling_factors", "num_poolings", "batch_sizes"):
            for value in getattr(limits, name) or ():
                what = f"one of {name} of table {table!r}"
                whole_number(value, what) if name == "batch_sizes" else not_negative(value, what)
    tables = {name for name, _, _ in sharded}
    unknown = sorted(constraints.keys() - tables)
    if unknown:
        raise ConversionError(
            f"constraints name {', '.join(map(repr, unknown))}, but no collection has such a table"
            f"{did_you_mean(unknown[0], tables)}.",
            reason="unknown_table",
            what_to_do=f"the tables are {', '.join(sorted(tables))}.",
        )
    for table, path, sharder in sharded:
        limits = constraints.get(table, ParameterConstraints())
        # TorchRec's planner leaves tables of another device group out of the plan.
        if limits.device_group not in (None, "", device) or not any(
            is_plannable(sharding_type, kernel)
            for sharding_type in sharder.sharding_types(device)
            for kernel in sharder.compute_kernels(sharding_type, device)
            if not limits.sharding_types or sharding_type in limits.sharding_types
            if not limits.compute_kernels or kernel in limits.compute_kernels
        ):
            raise no_sharding_option(table, path, f"on {device}")


# Sharding for ``recfx.convert(model, plan=..., env=...)``


def shard_collections(
    model: nn.Module, plan: ShardingPlan, env: ShardingEnv, device: torch.device | str | None
) -> dict[int, ShardedCollection]:
    """The sharded form of every converted collection, by ``id``; ``model`` is not changed. Collective."""
    target, collections = None if device is None else torch.device(device), unsharded_collections(model)
    return {
        id(collections[path]): shard_collection(collections[path], of_collection, env, target, path=path)
        for path, of_collection in plans_of_collections(_by_every_path(model), plan).items()
    }


def plans_of_collections(collections: Mapping[str, nn.Module], plan: ShardingPlan) -> dict[str, Any]:
    """What a plan says of each collection, by the first of its paths; ``collections`` has those of a model by all."""
    refuse_unknown_collections(plan, collections)
    paths: dict[int, list[str]] = {}
    for path, collection in collections.items():
        paths.setdefault(id(collection), []).append(path)
    return {aliases[0]: plan_of_collection(plan, aliases) for aliases in paths.values()}


def _by_every_path(model: nn.Module) -> dict[str, nn.Module]:
    return {prefix.removesuffix("."): module for prefix, module in collections_by_prefix(model, UnshardedCollection)}


def environment(env: ShardingEnv | None) -> ShardingEnv:
    """The ranks to shard over: ``env`` or, without one, all ranks of the default process group."""
    if env is not None:
        return env
    if not (dist.is_available() and dist.is_initialized()):
        raise ConversionError(
            "there is no process group to shard over.",
            reason="no_process_group",
            what_to_do="call torch.distributed.init_process_group first, or pass "
            "env=ShardingEnv.from_process_group(...).",
        )
    return ShardingEnv.from_process_group(dist.group.WORLD)


def plan_for(
    model: nn.Module, given: ShardingPlan | None, env: ShardingEnv, device: torch.device | str | None
) -> ShardingPlan:
    """The plan that is given, if it is for this model, or that of ``recfx.plan``, which rank 0 makes. Collective."""
    kind = device_of_tables(model) if device is None else torch.device(device).type

    def make() -> ShardingPlan | None:
        if given is not None:
            world_size_of(given, env.world_size)
            plans_of_collections(_by_every_path(model), given)
            return None
        is_first = env.rank == 0 or env.process_group is None
        return make_plan(model, plain_topology(env.world_size, kind), with_torchrec=False) if is_first else None

    plans = on_all_ranks_with_plan(env.process_group, given, make)
    return next(made for made in plans if made is not None) if given is None else given
