"""What each node of a model's graphs costs per step, for pictures: in words, and as formulas that a page evaluates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.optimizer_settings import check_optimizers
from recfx.collections.sharding.whole_plan import MOST_RANKS, check_plan
from recfx.collections.whole_graph import WholeGraph
from recfx.discovery.classify import Finding
from recfx.discovery.discover import discover
from recfx.discovery.wrappers import unwrap
from recfx.errors import ConversionError, DrawingError
from recfx.inspect import wording
from recfx.inspect.cost import cost, price_planned
from recfx.ir.meta import BATCH, WORLD, mean_length
from recfx.passes import Rewriting
from recfx.planner.placements import PRIVATE
from recfx.planner.plan import plan_of_collections as make_plan
from recfx.planner.priced_plan import topology_of, world_size_of
from recfx.planner.pricing.cost import Cost
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_price import runs_on_host
from recfx.planner.pricing.times import seconds_of_collective, seconds_of_work
from recfx.planner.pricing.values import whole_number
from recfx.planner.pricing.work import NOTHING, NodeCost, Work
from recfx.planner.topology import NpuTopology, check_topology, hardware_of
from recfx.replacement.conversion_record import Conversion, conversion_of, recorded
from recfx.replacement.replace_collections import converted_by_path, unchanged


def time_formula(node: NodeCost, hardware: Hardware, world_size: int, formula: Callable[[sympy.Expr], Any]) -> Any:
    """The seconds that :func:`recfx.planner.pricing.node_price.price` predicts, as a formula.

    Args:
        node: of one rank.
        hardware: where it runs.
        world_size: the number of ranks.
        formula: makes the formula of an expression; None if it is not known.

    Returns:
        0 for a node that has nothing to do; None if a formula is not known.
    """
    on_host = runs_on_host(node, hardware)
    overhead = seconds_of_work(NOTHING, hardware, on_host)
    terms: list[Any] = []
    for work in (node.forward, node.backward):
        found = {name: amount for name, amount in vars(work.symbolic()).items() if amount != 0}
        for name, amount in found.items():
            one = seconds_of_work(Work(**{name: 1.0}), hardware, on_host)
            terms.append(["*", one - overhead, formula(amount)])
        terms += [overhead] if found else []
    for call in node.collectives:
        ranks = call.ranks or world_size
        latency, one = (
            seconds_of_collective(call.operation, size, ranks, hardware, across_hosts=call.across_hosts)
            for size in (0.0, 1.0)
        )
        terms += [latency, ["*", one - latency, formula(call.bytes)]]
    if any(isinstance(term, list) and term[-1] is None for term in terms):
        return None
    return ["*", node.calls, ["+", *terms]] if terms else 0


AMOUNTS = {
    "read_bytes": "bytes read",
    "written_bytes": "bytes written",
    "wire_bytes": "bytes sent",
    "flops": "flops",
    "resident_bytes": "bytes that stay in memory",
}
"""The fields of ``NodeCost`` that are shown, and their names."""

TIME = "predicted time"
"""The name of the seconds of a node, which are only shown for given hardware."""

_OPERATIONS: dict[type, str] = {sympy.Add: "+", sympy.Mul: "*", sympy.Pow: "^", sympy.Min: "min", sympy.Max: "max"}


Amount = tuple[str, str, Any]
"""One thing that a node costs: what it is called; the expression, or the hardware that a time is predicted for; and the
same as data, see :func:`formula`, or None if that has no word for one of its operations."""


@dataclass(frozen=True)
class DrawnCosts:
    """The costs of a model or a graph.

    Args:
        nodes: for each node that costs something, its collection and its amounts.
        places: the position of a node in ``nodes``, by its collection and its name.
        features: the features, in the order in which formulas count them.
        world_size: the number of ranks that this is for.
        trains: whether the backward is part of it.
        hardware: what times are predicted for; ``""`` if none are.
        no_times: why none are, although hardware was given.
        device: the type of device that the hardware is, if it is known.
    """

    nodes: tuple[tuple[str, tuple[Amount, ...]], ...] = ()
    places: Mapping[tuple[str, str], int] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    world_size: int = 1
    trains: bool = False
    hardware: str = ""
    no_times: str = ""
    device: str = ""

    def place(self, collection: str, name: str) -> int:
        """The position of a node; -1 if nothing is known of its cost."""
        return self.places.get((collection, name), -1)

    def is_of(self, device: str) -> bool:
        """Whether what runs on tensors of a device is what the times are of; on meta, nothing runs."""
        kind = device.split(":")[0]
        return kind != "meta" and self.device in ("", "npu" if kind == PRIVATE else kind)


NO_COSTS = DrawnCosts()


def costs_of(model: nn.Module, hardware: Hardware | None = None) -> DrawnCosts:
    """The costs of a converted model, or of a graph; nothing for a model that is not converted.

    Args:
        model: the model or the graph.
        hardware: what times are predicted for; without it, none are.
    """
    try:
        found = cost(model)
    except ConversionError:  # no converted collection: nothing can be priced
        return NO_COSTS
    return drawn_costs(found, hardware, "" if hardware is None else _no_times(model, hardware))


def drawn_costs(found: Cost, hardware: Hardware | None = None, no_times: str = "") -> DrawnCosts:
    """A cost as pictures show it.

    Args:
        found: the cost.
        hardware: what times are predicted for; without it, none are.
        no_times: why none are, although there is hardware.
    """
    hardware = None if no_times else hardware
    lengths = {mean_length(feature): place for place, feature in enumerate(found.features)}
    return DrawnCosts(
        nodes=tuple((node.collection, _amounts(node, hardware, found.world_size, lengths)) for node in found.nodes),
        places={(node.collection, node.name): place for place, node in enumerate(found.nodes)},
        features=tuple(found.features),
        world_size=found.world_size,
        trains=found.trains,
        hardware="" if hardware is None else hardware.name,
        no_times=no_times,
        device="" if hardware is None else hardware.device,
    )


def _no_times(model: nn.Module, hardware: Hardware) -> str:
    """Why the graphs of a model say too little about times; ``""`` if they do not."""
    if hardware.device in ("cpu", "") or not any(map(_has_indexes_on_meta, model.modules())):
        return ""
    return (
        f"Times on {hardware.name} are left out: ids of hashed tables go to the host and back, which is not in the "
        "graph of tables on meta. Draw the model before it is sharded, with topology= or plan=."
    )


def _has_indexes_on_meta(module: nn.Module) -> bool:
    """Whether it is a sharded collection with hashed tables on meta, whose graph copies no ids."""
    if not isinstance(module, ShardedCollection) or module.store.device.type != "meta":
        return False
    return any(each.table.has_index for each in module.sharding.tables)


def _amounts(
    node: NodeCost, hardware: Hardware | None, world_size: int, lengths: Mapping[sympy.Symbol, int]
) -> tuple[Amount, ...]:
    amounts: list[Amount] = []
    if hardware is not None:
        seconds = time_formula(node, hardware, world_size, lambda value: formula(value, lengths))
        amounts += [] if seconds == 0 else [(TIME, f"on {hardware.name}", seconds)]
    for attribute, name in AMOUNTS.items():
        value = sympy.sympify(getattr(node, attribute))
        amounts += [] if value == 0 else [(name, wording.expression(value), formula(value, lengths))]
    return tuple(amounts)


def formula(value: sympy.Expr, lengths: Mapping[sympy.Symbol, int]) -> Any:
    """An expression as data that can be evaluated without running code; None if that is not possible.

    A number is itself; ``"B"`` and ``"W"`` are the batch size and the ranks, ``["L", place]`` is the mean length of a
    feature, ``["/", p, q]`` a fraction; anything else is ``[operation, argument, ...]``.

    Args:
        value: the expression.
        lengths: the places of the mean lengths.
    """
    if value.is_Integer:
        return int(value)
    if isinstance(value, sympy.Rational):
        return ["/", value.p, value.q]
    if value.is_Float:
        return float(value)
    if value in (BATCH, WORLD):
        return value.name
    if value in lengths:
        return ["L", lengths[value]]
    operation = _OPERATIONS.get(value.func)
    parts = [formula(part, lengths) for part in value.args]
    return None if operation is None or None in parts else [operation, *parts]


@dataclass(frozen=True)
class PlannedModel:
    """What a plan would make of a model.

    Args:
        findings: its collections as they are now.
        conversion: what a conversion would record of them.
        graphs: what the passes make of those that are sharded, on rank 0, by path.
        cost: of rank 0.
        hardware: what the plan is for, if that is known.
    """

    findings: list[Finding]
    conversion: Conversion
    graphs: Mapping[str, Rewriting]
    cost: Cost
    hardware: Hardware | None


def as_planned(
    model_or_graph: nn.Module,
    topology: Topology | NpuTopology | Hardware | None,
    plan: ShardingPlan | None,
    world_size: int | None,
) -> PlannedModel:
    """What a plan would make of a model; the model stays as it is, and nothing is communicated.

    Args:
        model_or_graph: a model that is not sharded.
        topology: what ``recfx.plan`` plans for, without a plan; or hardware that the plan is for.
        plan: the plan.
        world_size: the number of ranks that ``plan`` is for; see :func:`recfx.planner.priced_plan.world_size_of`.

    Raises:
        DrawingError: ``invalid_argument``, ``already_sharded``.
        InputError: ``invalid_argument``: ``world_size`` is no number of ranks.
        ConversionError: ``invalid_topology``, and those of ``recfx.plan`` and of sharding.
    """
    model = unwrap(model_or_graph)
    ranks = None if world_size is None else whole_number(world_size, "world_size", most=MOST_RANKS)
    given = None if isinstance(topology, Hardware) else topology
    _check(model, given, plan, ranks)
    with unchanged(model):
        discovery = discover(model)
        converted = converted_by_path(model, discovery)
    if plan is None:
        assert given is not None  # one of them is given
        plan = make_plan(model, given)
    ranks = world_size_of(plan, ranks or (None if given is None else given.world_size))
    topology = topology_of(plan) if topology is None else topology
    cost, graphs = price_planned(model, converted, plan, ranks, topology)
    for path in graphs:
        check_optimizers(converted[path])
    conversion = recorded(discovery, "keep", before=conversion_of(model))
    hardware = topology if topology is None or isinstance(topology, Hardware) else hardware_of(topology)
    return PlannedModel(discovery.findings, conversion, graphs, cost, hardware)


def _check(model: nn.Module, topology: Any, plan: Any, ranks: int | None) -> None:
    if topology is not None:
        check_topology(topology)
    if plan is not None:
        check_plan(plan)
    if plan is None and (topology is None or ranks not in (None, topology.world_size)):
        raise DrawingError(
            "world_size is given, but no plan for so many ranks.",
            reason="invalid_argument",
            what_to_do="pass plan= as well, or a topology instead, for which a plan is made.",
        )
    is_sharded = any(isinstance(each, ConvertedCollection) and each.is_sharded for each in model.modules())
    if is_sharded or isinstance(model, (torch.fx.GraphModule, WholeGraph)):
        raise DrawingError(
            f"{'it' if is_sharded else 'a graph'} has its own plan, and cannot be drawn with another.",
            reason="already_sharded",
            what_to_do="leave out topology=, plan= and world_size=, or pass the model before it is sharded or a graph.",
        )
