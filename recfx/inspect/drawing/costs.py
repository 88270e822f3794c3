"""What each node of a model's graphs, and each table of each rank, costs per step, for pictures: in words, and as
formulas that a page evaluates.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import nn

from recfx.errors import ConversionError
from recfx.inspect.cost import cost
from recfx.ir.meta import BATCH, WORLD, mean_length
from recfx.ir.tables import Shard
from recfx.planner.pricing.cost import Cost
from recfx.planner.pricing.graph_prices import costs_of_shard
from recfx.planner.pricing.hardware import CPU_HOST, Hardware
from recfx.planner.pricing.node_facts import SYMBOLS
from recfx.planner.pricing.step_price import PlannedCollection, price
from recfx.planner.pricing.work import LENGTH, NodeCost, Resident, expression
from recfx.planner.topology import device_of_tables

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
    device: str = ""  # what the graphs were made for, if the tables are somewhere else

    @functools.cached_property
    def _places(self) -> dict[tuple[str, str], int]:
        return {(node.collection, node.name): place for place, node in enumerate(self.cost.nodes)}

    @functools.cached_property
    def _lengths(self) -> dict[sympy.Symbol, int]:
        return {mean_length(feature): place for place, feature in enumerate(self.cost.features)}

    def place(self, collection: str, name: str) -> int:
        """The position of a node among the nodes of the cost; -1 if it is not there."""
        return self._places.get((collection, name), -1)

    def amounts_of(self, node: NodeCost, hardware: Hardware | None = None) -> tuple[Amount, ...]:
        """What a node costs on some hardware; default: that of the cost."""
        hardware = hardware or self.cost.hardware
        lengths = self._lengths
        seconds: Any = price(node, SYMBOLS._replace(world=self.cost.world_size), hardware).seconds
        amounts: list[Amount] = []
        if seconds != 0:
            amounts.append((TIME, f"on {hardware.name}", formula(sympy.sympify(seconds), lengths)))
        for attribute, name in AMOUNTS.items():
            value = sympy.sympify(getattr(node, attribute))
            amounts += [] if value == 0 else [(name, expression(value), formula(value, lengths))]
        return tuple(amounts)

    def as_data(self, positions: Mapping[str, int]) -> dict[str, Any]:
        """What the page's script reads; ``positions`` has the place of each collection, by path."""
        cost, note = self.cost, self.cost.copies_left_out
        lengths = [(name, float(cost.lengths.get(name, LENGTH))) for name in cost.features]
        named = [f"{name}={length:g}" for name, length in lengths if length != LENGTH]
        return {
            "nodes": [
                {"collection": positions.get(node.collection, -1), "amounts": self.amounts_of(node)}
                for node in cost.nodes
            ],
            "features": cost.features,
            "W": cost.world_size,
            "B": cost.batch,
            "L": LENGTH,
            "lengths": ", ".join([f"{LENGTH:g}", *named]),
            "trains": cost.trains,
            "hardware": cost.hardware.label if cost.nodes else "",
            "note": note and f"{note[0].upper()}{note[1:]}.",
            "rank": cost.rank,
            "shards": [
                {"collection": positions.get(planned.context.name, -1), **shards}
                for planned in cost.planned
                for shards in self._shards(planned)
            ],
        }

    def _shards(self, planned: PlannedCollection) -> Iterator[dict[str, Any]]:
        """The shards of a sharded collection; those of one table that cost their ranks the same are one item.

        ``type`` is the sharding type; ``ranks`` are ranges, each the first rank and the one after the last; ``amounts``
        are what hashing and looking up cost, without what every node costs.
        """
        alone = replace(self.cost.hardware, node_overhead=0.0)
        for table in planned.sharding.tables:
            alike: dict[tuple[int, int, Resident], list[Shard]] = {}
            for shard in table.filled:
                alike.setdefault((shard.num_rows, shard.num_columns, planned.resident(shard)), []).append(shard)
            for (rows, columns, resident), group in alike.items():
                lookup, *others = costs_of_shard(planned.context, group[0].spec, self.cost.trains, planned.calls)
                nodes = [replace(lookup, resident=resident), *others]
                yield {
                    "table": table.table.name,
                    "type": table.type.name,
                    "rows": rows,
                    "columns": columns,
                    "ranks": _ranges([shard.rank for shard in group]),
                    "amounts": [
                        (name, "", formula) for node in nodes for name, _, formula in self.amounts_of(node, alone)
                    ],
                }


NO_COSTS = DrawnCosts(Cost((), (), 1, 0, False, "", replace(CPU_HOST, device="")))


def costs_of(model: nn.Module, hardware: Hardware | None = None, sample: Any = None) -> DrawnCosts:
    """The costs of a converted model or of a graph on ``hardware``, or on its own device; nothing if it is neither."""
    try:
        priced = cost(model, hardware, sample=sample)
    except ConversionError as error:
        if hardware is not None and error.reason != "no_collection":
            raise
        return NO_COSTS  # nothing is converted, or its graph cannot be priced
    return DrawnCosts(priced, "" if priced.device == device_of_tables(model) else priced.device)


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


def _ranges(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ranks as ranges; a rank that has several shards is there several times."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank:
            ranges[-1] = (ranges[-1][0], rank + 1)
        else:
            ranges.append((rank, rank + 1))
    return tuple(ranges)
