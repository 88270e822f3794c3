"""The graphs of a collection, pass by pass, from the records of its passes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import sympy
from torch import fx

from recfx.errors import ConversionError, Diagnostic
from recfx.inspect import wording
from recfx.inspect.drawing.costs import NO_COSTS, DrawnCosts
from recfx.inspect.drawing.drawing import ITEM, DrawnNode, DrawnStep
from recfx.ir.meta import NodeMeta, find_module
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.snapshot import NodeSnapshot, PassRecord
from recfx.runtime import HashLookup, Lookup


def drawn_steps(
    records: Sequence[PassRecord], kernels: Mapping[str, tuple[str, ...]], costs: DrawnCosts
) -> tuple[DrawnStep, ...]:
    """One step per record.

    Args:
        records: of the passes, in order.
        kernels: why each lookup has the kernel that it has, by name of the node.
        costs: of the nodes of the graph that the passes have made.
    """
    last = len(records) - 1
    return tuple(_step(record, kernels, costs if place == last else NO_COSTS) for place, record in enumerate(records))


def _step(record: PassRecord, kernels: Mapping[str, tuple[str, ...]], costs: DrawnCosts) -> DrawnStep:
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


def _node(node: NodeSnapshot, kernels: Mapping[str, tuple[str, ...]], costs: DrawnCosts) -> DrawnNode:
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


def kernels_now(graph_module: fx.GraphModule) -> dict[str, tuple[str, ...]]:
    """Which kernel serves each lookup of a graph now, and why, by name of the node."""
    found = {}
    for node in graph_module.graph.nodes:
        module = find_module(graph_module, node)
        lookup = module.lookup if isinstance(module, HashLookup) else module
        if isinstance(lookup, Lookup):
            try:
                choice = lookup.select(lookup.backend)
                found[node.name] = _why(choice.backend, choice.declined, lookup.backend)
            except ConversionError as error:
                found[node.name] = (f"none: {error.diagnostic.message}",)
    return found


def kernels_planned(graph: OperatorGraph, asked: str) -> dict[str, tuple[str, ...]]:
    """Which kernel would serve each lookup of a planned graph, and why, with the backend that was asked for."""
    found = {}
    for node in graph.of_kind("lookup", "hash_lookup"):
        served = graph.served(node)
        found[node.name] = _why(served.backend, served.declined, asked)
    return found


def _why(backend: str, declined: Iterable[Diagnostic], asked: str) -> tuple[str, ...]:
    why_not = tuple(f"not {each.by}: {each.message}" for each in declined)
    if not backend:
        return (f"none: backend {asked!r} was asked for", *why_not)
    reason = "the backend that was asked for" if asked != "auto" else "the first that can serve these tables"
    return (f"{backend}: {reason}", *why_not)
