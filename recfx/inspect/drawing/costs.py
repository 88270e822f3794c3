"""What each node of a model's graphs costs per step, for pictures: in words, and as formulas that a page evaluates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from recfx.collections.wrappers import unwrap
from recfx.discovery.classify import Finding
from recfx.discovery.discover import discover
from recfx.errors import ConversionError, DrawingError
from recfx.inspect import wording
from recfx.inspect.cost import cost, price_planned
from recfx.ir.meta import BATCH, WORLD, mean_length
from recfx.passes import Rewriting
from recfx.planner.placements import PRIVATE
from recfx.planner.plan import plan_of_collections as make_plan
from recfx.planner.priced_plan import topology_of, world_size_of
from recfx.planner.pricing.cost import COST_VERSION, Cost
from recfx.planner.pricing.hardware import CPU_HOST, TYPICAL, Hardware
from recfx.planner.pricing.node_price import runs_on_host
from recfx.planner.pricing.times import as_modelled, seconds_of_collective, seconds_of_work
from recfx.planner.pricing.values import whole_number
from recfx.planner.pricing.work import NOTHING, NodeCost, Work
from recfx.planner.topology import NpuTopology, check_topology, device_of_tables, hardware_of
from recfx.replacement.conversion_record import Conversion, conversion_of, recorded
from recfx.replacement.replace_collections import converted_by_path, unchanged


def time_formula(node: NodeCost, hardware: Hardware, world_size: int, formula: Callable[[sympy.Expr], Any]) -> Any:
    """The seconds that :func:`recfx.planner.pricing.node_price.price` predicts for a node of one rank, as a formula.

    It is 0 for a node that has nothing to do, and None if ``formula`` gives None for one of its expressions.
    """
    on_host = runs_on_host(node, hardware)
    overhead = seconds_of_work(NOTHING, hardware, on_host)
    terms: list[Any] = []
    for work in (node.forward, node.backward):
        modelled = as_modelled(work.symbolic(), hardware, on_host)
        amounts = {name: amount for name, amount in modelled.amounts().items() if amount != 0}
        for name, amount in amounts.items():
            unit = seconds_of_work(Work(**dict[str, Any]({name: 1.0})), hardware, on_host)
            terms.append(["*", unit - overhead, formula(amount)])
        terms += [overhead] if amounts else []
    for call in node.collectives:
        ranks = call.ranks or world_size
        latency, unit = (
            seconds_of_collective(call.operation, size, ranks, hardware, across_hosts=call.across_hosts)
            for size in (0.0, 1.0)
        )
        terms += [latency, ["*", unit - latency, formula(call.bytes)]]
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
"""The name of the seconds of a node."""

_OPERATIONS: dict[type, str] = {sympy.Add: "+", sympy.Mul: "*", sympy.Pow: "^", sympy.Min: "min", sympy.Max: "max"}


Amount = tuple[str, str, Any]
"""One thing that a node costs: what it is called; the expression, or the hardware that a time is predicted for; and the
same as data, see :func:`formula`, or None if that has no word for one of its operations."""


@dataclass(frozen=True)
class DrawnCosts:
    """A cost as pictures show it: with times only if it is known what they are predicted for."""

    cost: Cost
    hardware: Hardware | None = None
    note: str = ""  # what is not in the times, or why there are none although the hardware is known
    device: str = ""  # what the graphs were made for, if the tables are somewhere else

    @functools.cached_property
    def _places(self) -> dict[tuple[str, str], int]:
        return {(node.collection, node.name): place for place, node in enumerate(self.cost.nodes)}

    def place(self, collection: str, name: str) -> int:
        """The position of a node among the nodes of the cost; -1 if it is not there."""
        return self._places.get((collection, name), -1)

    def is_of(self, device: str) -> bool:
        """Whether the times are those of what runs on tensors of a device; on meta, nothing runs."""
        kind = device.split(":")[0]
        timed = "" if self.hardware is None else self.hardware.device
        return kind != "meta" and timed in ("", "npu" if kind == PRIVATE else kind)

    def amounts(self) -> list[tuple[Amount, ...]]:
        """What each node costs, in the order of the cost's nodes."""
        lengths = {mean_length(feature): place for place, feature in enumerate(self.cost.features)}
        return [self.amounts_of(node, self.hardware, lengths) for node in self.cost.nodes]

    def amounts_of(
        self, node: NodeCost, hardware: Hardware | None, lengths: Mapping[sympy.Symbol, int]
    ) -> tuple[Amount, ...]:
        """What one node costs on some hardware; ``lengths`` has the place of each feature."""
        amounts: list[Amount] = []
        if hardware is not None:
            seconds = time_formula(node, hardware, self.cost.world_size, lambda value: formula(value, lengths))
            amounts += [] if seconds == 0 else [(TIME, f"on {hardware.name}", seconds)]
        for attribute, name in AMOUNTS.items():
            value = sympy.sympify(getattr(node, attribute))
            amounts += [] if value == 0 else [(name, wording.expression(value), formula(value, lengths))]
        return tuple(amounts)


NO_COSTS = DrawnCosts(Cost(COST_VERSION, (), (), 1, 0, False, "", CPU_HOST))


def costs_of(model: nn.Module, hardware: Hardware | None = None) -> DrawnCosts:
    """The costs of a converted model or of a graph on ``hardware``, or on what is typical of its device; nothing if it
    is not converted.
    """
    try:
        priced = cost(model, hardware)
    except ConversionError as error:
        if hardware is not None and error.reason != "no_collection":
            raise
        return NO_COSTS  # nothing is converted, or its graph cannot be priced
    hardware = hardware or TYPICAL.get(priced.device)
    no_times = "" if hardware is None else _no_times(model, hardware)
    if hardware is None or no_times:
        return DrawnCosts(priced, None, no_times)
    left_out = priced.copies_left_out(hardware)
    device = "" if priced.device == device_of_tables(model) else priced.device
    return DrawnCosts(priced, hardware, left_out and f"{left_out[0].upper()}{left_out[1:]}.", device)


def _no_times(model: nn.Module, hardware: Hardware) -> str:
    """Why the graphs of a model say too little about times; ``""`` if they do not."""
    on_meta = (
        module
        for module in model.modules()
        if isinstance(module, ShardedCollection) and module.store.device.type == "meta"
    )
    if hardware.device in ("cpu", "") or not any(module.tables_with_index() for module in on_meta):
        return ""
    return (
        f"Times on {hardware.name} are left out: ids of hashed tables go to the host and back, which is not in the "
        "graph of tables on meta. Draw the model before it is sharded, with topology= or plan=."
    )


def formula(value: sympy.Expr, lengths: Mapping[sympy.Symbol, int]) -> Any:
    """An expression as data that can be evaluated without running code; None if that is not possible.

    A number is itself; ``"B"`` and ``"W"`` are the batch size and the ranks, ``["L", place]`` is the mean length of a
    feature, ``["/", p, q]`` a fraction; anything else is ``[operation, argument, ...]``.
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
    """What a plan would make of a model on rank 0."""

    findings: list[Finding]  # its collections as they are now
    conversion: Conversion  # what a conversion would record of them
    graphs: Mapping[str, Rewriting]  # the graphs of the sharded collections, by path
    cost: Cost
    hardware: Hardware | None  # what the plan is for; if that is not known, what is typical of its device


def as_planned(
    model_or_graph: nn.Module,
    topology: Topology | NpuTopology | Hardware | None,
    plan: ShardingPlan | None,
    world_size: int | None,
) -> PlannedModel:
    """What ``plan``, or else ``recfx.plan``'s for ``topology``, would make of a model, which stays as it is.

    Raises:
        DrawingError: ``invalid_argument``, ``already_sharded``.
        InputError: ``invalid_argument``: ``world_size`` is no number of ranks.
        ConversionError: ``invalid_topology``, and those of ``recfx.plan`` and of sharding.
    """
    model = unwrap(model_or_graph)
    ranks = None if world_size is None else whole_number(world_size, "world_size", most=MOST_RANKS)
    of_ranks = None if isinstance(topology, Hardware) else topology
    _check(model, of_ranks, plan, ranks)
    with unchanged(model):
        discovery = discover(model)
        converted = converted_by_path(model, discovery)
    if plan is None:
        assert of_ranks is not None  # one of them is given
        plan = make_plan(model, of_ranks)
    ranks = world_size_of(plan, ranks or (None if of_ranks is None else of_ranks.world_size))
    topology = topology_of(plan) if topology is None else topology
    cost, graphs = price_planned(model, converted, plan, ranks, topology)
    for path in graphs:
        check_optimizers(converted[path])
    conversion = recorded(discovery, "keep", before=conversion_of(model))
    if topology is None:
        hardware = TYPICAL.get(cost.device)
    else:
        hardware = topology if isinstance(topology, Hardware) else hardware_of(topology)
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
    is_sharded = any(isinstance(module, ConvertedCollection) and module.is_sharded for module in model.modules())
    if is_sharded or isinstance(model, (torch.fx.GraphModule, WholeGraph)):
        raise DrawingError(
            f"{'it' if is_sharded else 'a graph'} has its own plan, and cannot be drawn with another.",
            reason="already_sharded",
            what_to_do="leave out topology=, plan= and world_size=, or pass the model before it is sharded or a graph.",
        )
