"""The graphs of a collection, pass by pass, from the records of its passes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import sympy
from torch import fx

from recfx.drawing.costs import NO_COSTS, DrawnCosts
from recfx.drawing.drawing import ITEM, DrawnNode, DrawnStep
from recfx.errors import ConversionError
from recfx.inspect import wording
from recfx.ir.meta import NodeMeta
from recfx.ir.snapshot import NodeSnapshot, PassRecord
from recfx.ir.typed_access import find_module
from recfx.nodes import HashLookup, Lookup


def drawn_steps(
    records: Sequence[PassRecord], graph_module: fx.GraphModule | None, costs: DrawnCosts
) -> tuple[DrawnStep, ...]:
    """One step per record; the last ones know the kernels that serve the lookups now, and why.

    Args:
        records: of the passes, in order.
        graph_module: the graph that they have made.
        costs: of the nodes of that graph.
    """
    kernels = {} if graph_module is None else _kernels(graph_module)
    last = len(records) - 1
    return tuple(_step(record, kernels, costs if place == last else NO_COSTS) for place, record in enumerate(records))


def _step(record: PassRecord, kernels: dict[str, tuple[str, ...]], costs: DrawnCosts) -> DrawnStep:
    given, giver, nodes = "", "", []
    for node in record.nodes:
        if node.op == "placeholder":
            given = node.name
        elif node.op == "output":
            giver = node.inputs[0] if node.inputs else ""
        else:
            nodes.append(_node(node, kernels, costs))
    declined = tuple(f"{one.code}: {one.message}" for one in record.declined)
    return DrawnStep(record.name, record.modified, tuple(nodes), giver, given, declined)


def _node(node: NodeSnapshot, kernels: dict[str, tuple[str, ...]], costs: DrawnCosts) -> DrawnNode:
    meta = node.meta
    if meta is None:
        return DrawnNode(node.name, ITEM, node.line, node.inputs)
    shape, size = _sizes(meta)
    kernel = meta.kernel if costs.is_of(meta.device) else ""
    return DrawnNode(
        name=node.name,
        kind=meta.kind,
        line=node.line,
        inputs=node.inputs,
        shape=shape,
        bytes=size,
        dtype="" if meta.dtype is None else str(meta.dtype).removeprefix("torch."),
        device=meta.device,
        kernel=kernel,
        why=kernels.get(node.name, ()) if kernel else (),
        tables=meta.tables,
        passes=meta.passes,
        collectives=meta.collectives,
        cost=costs.place(meta.collection, node.name),
        source=meta.source,
    )


def _sizes(meta: NodeMeta) -> tuple[str, str]:
    return _shape(meta.shape), _expression(meta.bytes)


@functools.lru_cache(maxsize=4096)  # the tables of a collection have few different shapes
def _shape(shape: tuple[sympy.Expr, ...]) -> str:
    return wording.shape(shape)


@functools.lru_cache(maxsize=4096)
def _expression(value: sympy.Expr) -> str:
    return wording.expression(value)


def _kernels(graph_module: fx.GraphModule) -> dict[str, tuple[str, ...]]:
    """Why each lookup has the kernel that it has, by name of the node."""
    found = {}
    for node in graph_module.graph.nodes:
        module = find_module(graph_module, node)
        lookup = module.lookup if isinstance(module, HashLookup) else module
        if isinstance(lookup, Lookup):
            found[node.name] = _why(lookup)
    return found


def _why(lookup: Lookup) -> tuple[str, ...]:
    try:
        choice = lookup.select(lookup.backend)
    except ConversionError as error:
        return (f"none: {error.diagnostic.message}",)
    asked = "the backend that was asked for" if lookup.backend != "auto" else "the first that can serve these tables"
    return (f"{choice.backend}: {asked}", *(f"not {each.by}: {each.message}" for each in choice.declined))
