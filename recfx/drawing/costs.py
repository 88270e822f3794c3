"""What each node of a model's graphs costs per step, in words, for pictures."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from recfx.errors import ConversionError
from recfx.inspect import wording
from recfx.inspect.cost import cost
from recfx.pricing.work import NodeCost

Costs = Mapping[tuple[str, str], tuple[str, ...]]
"""Lines by collection and name of the node."""


def costs_of(model: nn.Module) -> Costs:
    """The costs of a converted model, or of a graph; nothing for a model that is not converted."""
    try:
        found = cost(model)
    except ConversionError:  # no converted collection: nothing can be priced
        return {}
    return {(node.collection, node.name): _lines(node) for node in found.nodes}


def _lines(node: NodeCost) -> tuple[str, ...]:
    amounts = {
        "bytes read": node.read_bytes,
        "bytes written": node.written_bytes,
        "bytes sent": node.wire_bytes,
        "flops": node.flops,
    }
    lines = [f"{wording.expression(amount)} {name}" for name, amount in amounts.items() if amount != 0]
    if node.resident_bytes:
        lines.append(f"{wording.size(node.resident_bytes)} stay in memory")
    return tuple(lines)
