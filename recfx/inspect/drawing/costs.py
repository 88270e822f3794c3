"""What each node of a model's graphs costs per step, for pictures: in words, and as formulas that a page evaluates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.whole_graph import WholeGraph
from recfx.collections.wrappers import unwrap
from recfx.discovery.classify import Finding
from recfx.discovery.discover import discover
from recfx.errors import ConversionError, DrawingError
from recfx.inspect.cost import checked_topology, cost, priced_with_graphs
from recfx.ir.meta import BATCH, WORLD, mean_length
from recfx.passes import Rewriting
from recfx.planner.placements import PRIVATE
from recfx.planner.pricing.cost import COST_VERSION, Cost
from recfx.planner.pricing.cost_text import expression
from recfx.planner.pricing.hardware import CPU_HOST, Hardware
from recfx.planner.pricing.node_price import runs_on_host
from recfx.planner.pricing.times import seconds_of_collective, seconds_of_work
from recfx.planner.pricing.work import NOTHING, NodeCost, Work
from recfx.planner.topology import NpuTopology, device_of_tables
from recfx.replacement.conversion_record import Conversion, conversion_of, recorded
from recfx.replacement.replace_collections import unchanged


def time_formula(node: NodeCost, hardware: Hardware, world_size: int, formula: Callable[[sympy.Expr], Any]) -> Any:
    """The seconds that :func:`recfx.planner.pricing.node_price.price` predicts for a node of one rank, as a formula.

    It is 0 for a node that has nothing to do, and None if ``formula`` gives None for one of its expressions.
    """
    on_host = runs_on_host(node, hardware)
    overhead = seconds_of_work(NOTHING, hardware, on_host)
    terms: list[Any] = []
    for work in (node.forward, node.backward):
        amounts = {name: amount for name, amount in vars(work).items() if amount != 0}
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
    """A cost as pictures show it."""

    cost: Cost
    note: str = ""  # what is not in the times
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
        return kind != "meta" and self.cost.hardware.device in ("", "npu" if kind == PRIVATE else kind)

    def amounts(self) -> list[tuple[Amount, ...]]:
        """What each node costs, in the order of the cost's nodes."""
        lengths = {mean_length(feature): place for place, feature in enumerate(self.cost.features)}
        return [self.amounts_of(node, self.cost.hardware, lengths) for node in self.cost.nodes]

    def amounts_of(self, node: NodeCost, hardware: Hardware, lengths: Mapping[sympy.Symbol, int]) -> tuple[Amount, ...]:
        """What one node costs on some hardware; ``lengths`` has the place of each feature."""
        seconds = time_formula(node, hardware, self.cost.world_size, lambda value: formula(value, lengths))
        amounts: list[Amount] = [] if seconds == 0 else [(TIME, f"on {hardware.name}", seconds)]
        for attribute, name in AMOUNTS.items():
            value = sympy.sympify(getattr(node, attribute))
            amounts += [] if value == 0 else [(name, expression(value), formula(value, lengths))]
        return tuple(amounts)


NO_COSTS = DrawnCosts(Cost(COST_VERSION, (), (), 1, 0, False, "", replace(CPU_HOST, device="")))


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
    left_out = priced.copies_left_out(priced.hardware)
    device = "" if priced.device == device_of_tables(model) else priced.device
    return DrawnCosts(priced, left_out and f"{left_out[0].upper()}{left_out[1:]}.", device)


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


def as_planned(
    model_or_graph: nn.Module,
    topology: Topology | NpuTopology | Hardware | None,
    plan: ShardingPlan | None,
    world_size: int | None,
) -> PlannedModel:
    """What ``plan``, or else ``recfx.plan``'s for ``topology``, would make of a model, which stays as it is.

    Raises:
        DrawingError: ``already_sharded``; and what ``recfx.cost`` raises.
    """
    model = unwrap(model_or_graph)
    is_sharded = any(isinstance(module, ConvertedCollection) and module.is_sharded for module in model.modules())
    if is_sharded or isinstance(model, (torch.fx.GraphModule, WholeGraph)):
        raise DrawingError(
            f"{'it' if is_sharded else 'a graph'} has its own plan, and cannot be drawn with another.",
            reason="already_sharded",
            what_to_do="leave out topology=, plan= and world_size=, or pass the model before it is sharded or a graph.",
        )
    with unchanged(model):
        discovery = discover(model)
    cost, graphs = priced_with_graphs(model, checked_topology(topology), plan, world_size)
    return PlannedModel(discovery.findings, recorded(discovery, "keep", before=conversion_of(model)), graphs, cost)
