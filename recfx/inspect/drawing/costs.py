"""What each node of a model's graphs costs per step, for pictures: in words, and as formulas that a page evaluates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import nn

from recfx.collections.sharding.collection import ShardedCollection
from recfx.errors import ConversionError
from recfx.inspect import wording
from recfx.inspect.cost import cost
from recfx.ir.meta import BATCH, WORLD, mean_length
from recfx.planner.placements import PRIVATE
from recfx.planner.pricing.cost import Cost
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_price import runs_on_host
from recfx.planner.pricing.times import WorkAt, seconds_of_collective, seconds_of_work
from recfx.planner.pricing.work import NodeCost

_NOTHING = WorkAt(*(0.0 for _ in WorkAt._fields))


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
    overhead = seconds_of_work(_NOTHING, hardware, on_host)
    terms: list[Any] = []
    for work in (node.forward, node.backward):
        amounts = {name: sympy.sympify(getattr(work, name)) for name in WorkAt._fields}
        found = {name: amount for name, amount in amounts.items() if amount != 0}
        for name, amount in found.items():
            one = seconds_of_work(_NOTHING._replace(**{name: 1.0}), hardware, on_host)
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
