"""``recfx.cost``: what each node of a model, or of a graph, costs per step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx, nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import converted_collections
from recfx.collections.sharding.plan import MOST_RANKS, check_plan
from recfx.collections.sharding.settings import check_optimizers
from recfx.collections.whole_graph import WholeGraph
from recfx.collections.wrappers import unwrap
from recfx.errors import ConversionError, did_you_mean
from recfx.errors.argument_types import typed
from recfx.ir.operator_graph import lowered_from
from recfx.models.replace_collections import as_converted
from recfx.models.sample import Sample
from recfx.planner.plan import make_plan, plans_of_collections
from recfx.planner.priced_plan import world_size_of
from recfx.planner.pricing.cost import Cost, PlanComparison, PlanRow, features_of
from recfx.planner.pricing.graph_prices import GraphPrices, ModelPrices
from recfx.planner.pricing.hardware import CPU_HOST, NAMED, TYPICAL, Hardware, HardwareName
from recfx.planner.pricing.node_facts import whole_number
from recfx.planner.pricing.step_price import graph_on, planned_by, planned_with
from recfx.planner.pricing.work import BATCH_SIZE, NodeCost
from recfx.planner.topology import device_of, device_of_tables, hardware_of, of_ranks, plain_topology


@typed(ConversionError)
def cost(
    model_or_graph: nn.Module,
    topology: Topology | Hardware | HardwareName | None = None,
    *,
    plan: ShardingPlan | None = None,
    world_size: int | None = None,
    sample: Any = None,
) -> Cost:
    """What each node costs per step: bytes read, written, sent and kept, and flops, as expressions.

    The expressions are in ``B`` (samples per rank), ``W`` (ranks) and ``L_<feature>`` (mean number of ids per sample);
    ``.at(B=..., L=...)`` gives numbers, predicts times, and says what every rank has and does. Nothing is run, no
    table is allocated, and no process group is needed: a plan for 1,024 ranks is priced in this process.

    A model in training mode is priced with its backward. What recfx did not make is one node, of which only the linear
    layers count as work; on several ranks, the averaging of its gradients, as ``DistributedDataParallel`` does it, is
    the last line, ``dense_all_reduce``.

    Example:
        >>> from recfx.planner.pricing.hardware import ASCEND_910B
        >>> cost = recfx.cost(recfx.convert(Model()), ASCEND_910B)
        >>> [node.name for node in cost.at(B=4096, L={"user": 20}).nodes]
        ['ebc_select_features', 'ebc_lookup', 'ebc_keyed_tensor', 'dense']

    Args:
        model_or_graph: a model, converted or not, sharded (this rank's graph is priced) or not; or a graph of
            ``recfx.trace``. A model that is not converted yet is priced as ``convert`` would convert it by default.
        topology: TorchRec's topology or an :func:`recfx.planner.topology.npu_topology`: times are predicted for its
            links and memories, and a model that is not sharded is priced as ``recfx.plan`` would shard it over its
            ranks. Or a :class:`recfx.planner.pricing.hardware.Hardware` or the name of one (``"ascend_910b"``,
            ``"h100"``, ``"cpu"``): one such device, or of a CPU its times alone. Default: what ``recfx.plan``
            made ``plan`` for, if it did; otherwise what is typical of the device that has the tables.
        plan: the plan to price, for a model that is not sharded.
        world_size: the number of ranks that ``plan`` is for. Default: those that it knows, if
            ``recfx.plan`` or ``read_plan`` made it, or those of the topology.
        sample: one call of the model, as for ``convert``: the batch of one rank. Its size and the mean lengths of its
            features are where ``.at()`` starts; it is not run. Without one, that is 512 samples of one id per feature.

    Raises:
        ConversionError: ``invalid_argument``, ``no_collection``, ``already_sharded``, ``plan_unknown_collection``,
            ``plan_missing_collection``, ``plan_rank``, ``unknown_world_size``, and those of ``recfx.plan`` and of
            sharding.
        InputError: ``invalid_argument``: ``world_size`` is no number of ranks.
    """
    topology = checked_topology(topology)
    if world_size is not None:
        world_size = whole_number(world_size, "world_size", most=MOST_RANKS)
        refuse_ranks_without_plan(world_size, plan, topology)
    model = unwrap(model_or_graph)
    if isinstance(model, WholeGraph):
        model = model.graph_module
    collections: list[Any] = list(converted_collections(model).values())
    is_graph, is_sharded = isinstance(model, fx.GraphModule), any(collection.is_sharded for collection in collections)
    ranks, again = topology.world_size if isinstance(topology, Topology) else 1, None
    converted: Mapping[str, UnshardedCollection] = {}
    if is_graph or is_sharded:
        if plan is not None or (ranks > 1 and not is_sharded and _ranks([model])[1] == 1):
            raise ConversionError(
                f"{'a graph' if is_graph else 'a sharded model'} has its own ranks, and cannot be priced on others.",
                reason="already_sharded",
                what_to_do="leave out plan= and topologies of several ranks, or pass the model before it is sharded; "
                "for the times of a graph as it is, pass one of recfx.planner.pricing.hardware.",
            )
    else:
        converted = as_converted(model)
        if plan is not None:
            check_plan(plan)
            is_for_ranks = world_size is None and isinstance(topology, Topology)
            world_size = world_size_of(plan, ranks if is_for_ranks else world_size)
            topology = getattr(plan, "topology", None) if topology is None else topology
        again = None if isinstance(topology, Hardware) else partial(_on_ranks, model_or_graph, topology, sample)
        if plan is None and ranks > 1:
            plan, world_size = make_plan(model, topology, with_torchrec=False), ranks
        collections = list({id(collection): collection for collection in converted.values()}.values())
    prices, rank = ModelPrices(model.training), 0
    hardware = TYPICAL.get(device_of_tables(model), CPU_HOST) if topology is None else hardware_of(topology)
    device = ("" if topology is None else device_of(topology)) or device_of_tables(model)
    if plan is None or world_size is None:
        rank, world_size = _ranks([model, *(collection.graph_module for collection in collections)])
        nodes, device = _as_it_is(prices, model, collections, device, world_size)
        sharded = (collection for collection in collections if collection.is_sharded)
        planned = tuple(planned_with(one, one.collection, one.sharding, device) for one in sharded)
    else:
        for collection in collections:
            check_optimizers(collection)
        planned = tuple(
            planned_by(converted[path], of_collection, world_size, device, path)
            for path, of_collection in plans_of_collections(converted, plan).items()
        )
        nodes = []
        for part in planned:
            nodes += GraphPrices(part.graph(rank=0), model.training).nodes(part.calls)
        for collection in collections:
            prices.dense("", collection)  # what it keeps is counted above
        nodes += prices.rest(model, collections, world_size)
    if all(node.kind == "dense" for node in nodes):
        raise ConversionError(
            "there is no collection in it that is converted or can be.",
            reason="no_collection",
            what_to_do="pass a model that holds collections of TorchRec, or a graph of recfx.trace.",
        )
    size, lengths = (None, {}) if sample is None else Sample.of(sample).sizes()
    return Cost(
        nodes=tuple(nodes), features=features_of(nodes), world_size=world_size, rank=rank, trains=model.training,
        device=device, hardware=hardware, planned=planned, again=again, batch=size or BATCH_SIZE, lengths=lengths,
    )  # fmt: skip


def _on_ranks(model: nn.Module, topology: Topology | None, sample: Any, ranks: int) -> Cost:
    """The cost of a model on another number of ranks, for which a plan is made."""
    like = plain_topology(ranks, device_of_tables(unwrap(model))) if topology is None else of_ranks(topology, ranks)
    return cost(model, like, sample=sample)


def refuse_ranks_without_plan(world_size: int | None, plan: ShardingPlan | None, topology: object) -> None:
    """Refuse a number of ranks (``invalid_argument``) that neither a plan nor a topology is for."""
    if world_size is not None and plan is None and world_size != getattr(topology, "world_size", None):
        raise ConversionError(
            "world_size is given, but no plan for so many ranks.",
            reason="invalid_argument",
            what_to_do="pass plan= as well, or a topology instead, for which a plan is made.",
        )


def _as_it_is(
    prices: ModelPrices, model: nn.Module, parts: Sequence[Any], device: str, world_size: int
) -> tuple[list[NodeCost], str]:
    """The nodes of a graph, or of a model as on one device of this type, and the type of the device they are on."""
    here, nodes = device_of_tables(model), list[NodeCost]()
    is_elsewhere = device not in (here, "cpu") and not any(part.is_sharded for part in parts)
    if isinstance(model, fx.GraphModule):
        nodes, is_elsewhere = prices.nodes_of(model), False
        nodes += prices.dense_all_reduce(model, parts) if world_size > 1 else []
    else:
        for part in parts:
            if not part.is_sharded:
                part.fused_optimizers()  # makes the graph for what the tables are now
            calls = max(part.calls, 1)
            if is_elsewhere:
                graph = graph_on(part, device).graph
                nodes += GraphPrices(graph, model.training, prices.counted, part.store).nodes(calls)
            else:
                nodes += prices.nodes_of(part.graph_module, calls)
        nodes += prices.rest(model, parts, world_size)
    return nodes, device if is_elsewhere else here


def checked_topology(given: Any) -> Topology | Hardware | None:
    """What to price for, which a name may say."""
    topology: Topology | Hardware | None = NAMED.get(given) if isinstance(given, str) else given
    if topology is None and given is not None:
        raise ConversionError(
            f"topology is {given!r}{did_you_mean(given, NAMED)}.",
            reason="invalid_argument",
            what_to_do=f"pass one of the names {', '.join(map(repr, NAMED))}, a Hardware, or a topology.",
        )
    return topology


def _ranks(graphs: Iterable[nn.Module]) -> tuple[int, int]:
    """This rank and the number of ranks of the collections in some graphs; 0 and 1 if none is sharded."""
    nodes = (node for module in graphs if isinstance(module, fx.GraphModule) for node in module.graph.nodes)
    for operator in filter(None, map(lowered_from, nodes)):
        sharding = operator.graph.collection(operator.node).sharding
        if sharding is not None:
            return sharding.rank, sharding.world_size
    return 0, 1


@typed(ConversionError)
def compare_plans(
    model: nn.Module,
    plans: Sequence[ShardingPlan] | Mapping[str, ShardingPlan],
    topology: Topology | Hardware | HardwareName | None = None,
    *,
    world_size: int | None = None,
    B: int | None = None,
    L: Any = None,
    sample: Any = None,
) -> PlanComparison:
    """What each of ``plans`` would cost per step, without processes and without tables.

    Example:
        >>> from recfx.planner.topology import npu_topology
        >>> plans = {"8 NPUs": recfx.plan(Model(), npu_topology(8)), "16 NPUs": recfx.plan(Model(), npu_topology(16))}
        >>> print(recfx.compare_plans(Model(), plans, L=20))
        training step on Ascend 910B, B=512 per rank, L: 20
        times predicted for Ascend 910B ...

    Args:
        model: a model that is not sharded, converted or not; it may be on meta.
        plans: plans for it, or plans by name.
        topology: as for ``recfx.cost``. Plans that ``recfx.plan`` made for different hardware need one.
        world_size: the number of ranks of all plans. Default: as for ``recfx.cost``.
        B: samples per rank. Default: as for ``.at()`` of a cost.
        L: the mean number of ids per sample: a number for all features, or a mapping with numbers for some of them.
        sample: as for ``recfx.cost``.

    Raises:
        ConversionError: as ``recfx.cost`` does; ``invalid_argument`` without plans.
        InputError: ``invalid_argument``, ``unknown_feature``.
    """
    named: Any = dict(enumerate(plans)) if isinstance(plans, (list, tuple)) else plans
    if not isinstance(named, Mapping) or not named or not all(isinstance(one, ShardingPlan) for one in named.values()):
        raise ConversionError(
            f"plans are {plans!r}.",
            reason="invalid_argument",
            what_to_do="pass a list of plans, such as those of recfx.plan, or a mapping from names to plans.",
        )
    rows = []
    for key, plan in named.items():
        name = f"plan {key}" if isinstance(key, int) else str(key)
        try:
            priced = cost(model, topology, plan=plan, world_size=world_size, sample=sample).at(B, L=L)
        except ConversionError as error:
            raise ConversionError.of(replace(error.diagnostic, message=f"{name}: {error.message}")) from error
        rows.append(PlanRow(name, _types(plan), priced))
    if different := [row for row in rows if row.cost.hardware != rows[0].cost.hardware]:
        raise ConversionError(
            f"{rows[0].name} and {different[0].name} are priced for different hardware ({rows[0].cost.hardware.name}, "
            f"{different[0].cost.hardware.name}) or hosts: their times say nothing about each other.",
            reason="invalid_argument",
            what_to_do=f"pass topology=, the hardware to compare them on: one of {', '.join(NAMED)}, or your own.",
        )
    return PlanComparison(tuple(rows))


def _types(plan: ShardingPlan) -> dict[str, str]:
    per_collection: dict[str, Any] = plan.plan
    return {
        f"{path}.{table}" if path else table: str(parameter.sharding_type)
        for path, tables in per_collection.items()
        for table, parameter in tables.items()
    }
