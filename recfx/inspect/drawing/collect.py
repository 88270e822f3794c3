"""From a model or a graph to what a picture of it shows. Looks only: nothing runs, changes or communicates."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_classes import converted_class
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import KINDS, POOLED, kind_of
from recfx.collections.sharding.collection import SHARDED
from recfx.collections.whole_graph import WholeGraph
from recfx.collections.wrappers import unwrap, users_path
from recfx.discovery.classify import CONVERTED, Finding
from recfx.discovery.discover import discover
from recfx.discovery.shallow_tracer import source_of
from recfx.errors import ConversionError, Diagnostic, DrawingError
from recfx.inspect.describe import declared_table, declared_tables
from recfx.inspect.drawing.costs import NO_COSTS, DrawnCosts, PlannedModel, costs_of
from recfx.inspect.drawing.drawing import CALL, DENSE, INPUT, OUTPUT, Drawing, Nodes, drawn_collection
from recfx.ir.meta import SourceLocation, find_module, node_meta
from recfx.ir.node_kinds import NODE_KINDS
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.printer import format_node
from recfx.passes.base import BEFORE, PASSES_KEY, PassRecord
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.planned_collection import graph_on
from recfx.planner.topology import chip_of
from recfx.replacement.conversion_record import Found, conversion_of
from recfx.runtime import HashLookup, Lookup
from recfx.versions import __version__


@dataclass(eq=False)
class _Call:
    """One call of a collection in the graph of a model."""

    name: str
    path: str
    nodes: list[fx.Node]
    inputs: list[fx.Node]  # from outside the call
    source: SourceLocation | None
    collection: int  # its position in the drawing


def _find_calls(graph_module: fx.GraphModule, places: Mapping[int, int]) -> list[_Call]:
    """The calls; ``places`` has the position of each collection, by the ``id`` of its module."""
    calls = []
    for nodes in _inlined(graph_module):
        (first, meta), *_ = [(node, meta) for node in nodes if (meta := node_meta(node)) is not None]
        prefix = str(first.target).rpartition(".graph_module.")[0]
        own = set(nodes)
        inputs = [source for node in nodes for source in node.all_input_nodes if source not in own]
        name = first.name.removesuffix(f"_{meta.kind}") if first.name.endswith(meta.kind) else first.name
        position = places.get(id(_submodule(graph_module, prefix)), -1)
        calls.append(_Call(name, meta.collection, nodes, list(dict.fromkeys(inputs)), meta.source, position))
    for node in graph_module.graph.nodes:
        position = places.get(id(find_module(graph_module, node)), -1)
        if position >= 0:
            calls.append(_Call(node.name, str(node.target), [node], node.all_input_nodes, source_of(node), position))
    return [call for call in calls if call.collection >= 0]


def _submodule(graph_module: fx.GraphModule, path: str) -> object:
    try:
        return graph_module.get_submodule(path)
    except AttributeError:
        return None


def _inlined(graph_module: fx.GraphModule) -> list[list[fx.Node]]:
    """The nodes of each inlined call: nodes of one collection between which values travel without leaving it."""
    leaders: dict[fx.Node, fx.Node] = {}

    def leader(node: fx.Node) -> fx.Node:
        while leaders[node] is not node:
            leaders[node] = node = leaders[leaders[node]]
        return node

    for node in graph_module.graph.nodes:
        if _collection_of_node(node) is None:
            continue
        leaders[node] = node
        for source in node.all_input_nodes:
            if source in leaders and _collection_of_node(source) == _collection_of_node(node):
                leaders[leader(source)] = leader(node)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in leaders:
        groups.setdefault(leader(node), []).append(node)
    return list(groups.values())


def _collection_of_node(node: fx.Node) -> str | None:
    """The collection that a node belongs to, which may be an item of what one of its nodes returns."""
    meta = node_meta(node)
    if meta is None and node.target is operator.getitem:
        meta = node_meta(node.all_input_nodes[0])
        if meta is not None and len(NODE_KINDS[meta.kind].outputs) == 1:
            return None  # the user's code takes a feature out of the output
    return None if meta is None else meta.collection


def collect(subject: nn.Module, hardware: Hardware | None = None, planned: PlannedModel | None = None) -> Drawing:
    """What a picture of a model or a graph shows, with times on ``hardware``; or what a plan would make of it.

    Raises:
        DrawingError: ``no_collection``.
    """
    model = unwrap(subject)
    costs = costs_of(model, hardware) if planned is None else DrawnCosts(planned.cost)
    graph_module = model.graph_module if isinstance(model, WholeGraph) else model
    nodes = Nodes()
    if isinstance(graph_module, fx.GraphModule) and (own := graph_module.meta.get(PASSES_KEY)):
        outer, collections = _graph_of_collection(graph_module, own, costs, nodes)
    else:
        if planned is None:
            findings = discover(model.python_model if isinstance(model, WholeGraph) else subject).findings
        else:
            findings = planned.findings
        conversion = conversion_of(model) if planned is None else planned.conversion
        records = {record.paths[0]: record for record in conversion.found}
        collections = tuple(
            _collection(finding, records.get(finding.path), costs, nodes)
            if planned is None or finding.path not in planned.graphs
            else _as_planned(finding, records[finding.path], planned, costs, nodes)
            for finding in findings
        )
        places = {id(finding.module): position for position, finding in enumerate(findings)}
        if isinstance(graph_module, fx.GraphModule):
            outer = _graph_of_model(graph_module, places, costs, nodes)
        else:
            outer = ()
        called = {nodes.all[place].get("collection") for place in outer}
        alone = [position for position, finding in enumerate(findings) if position not in called]
        for position in alone:
            finding = findings[position]
            source = next(iter(_sources(finding, records.get(finding.path))), None)
            outer += (_lone_call(position, finding.path, source, nodes),)
    if not collections:
        raise DrawingError(
            "there is no collection in the model, so there is nothing to draw.",
            reason="no_collection",
            what_to_do="pass the model that holds the collections of TorchRec, or its graph.",
        )
    steps = tuple(dict.fromkeys(step["name"] for collection in collections for step in collection["steps"]))
    if not steps:
        costs = NO_COSTS  # of what a conversion would make, which is not drawn
    ranks = None if planned is None else planned.cost.world_size
    names = {path: users_path(subject, path) for collection in collections for path in collection["paths"]}
    title, subtitle = _title(model), _subtitle(graph_module, ranks)
    return Drawing(title, subtitle, nodes.all, outer, collections, (BEFORE, *steps), costs, names)


def _title(model: nn.Module) -> str:
    inner = model.python_model if isinstance(model, WholeGraph) else model
    return type(inner).__name__


def _subtitle(model: nn.Module, planned_ranks: int | None) -> str:
    rank = ""
    if planned_ranks is not None:
        rank = f", rank 0 of {planned_ranks} as planned"
    elif dist.is_available() and dist.is_initialized():
        rank = f", rank {dist.get_rank()} of {dist.get_world_size()}"
    return f"recfx {__version__}, torch {torch.__version__}, {'train' if model.training else 'eval'} mode{rank}"


def _collection(finding: Finding, record: Found | None, costs: DrawnCosts, nodes: Nodes) -> dict[str, Any]:
    module = finding.module
    steps: tuple[PassRecord, ...] = ()
    kernels: dict[str, tuple[str, ...]] = {}
    device = str(getattr(module, "device", "") or "")
    if isinstance(module, UnshardedCollection) and costs.device:
        device = costs.device
        made = graph_on(module, device, chip_of(costs.cost.hardware, device))
        steps, kernels = made.records, _kernels_planned(made.graph, module.backend)
    elif isinstance(module, ConvertedCollection):
        steps = module.graph_module.meta.get(PASSES_KEY, ())  # of the mode that it is in
        kernels = _kernels_now(module.graph_module)
    kind, tables = type(module).__name__, declared_tables(module)
    return drawn_collection(
        finding.paths,
        kind,
        kind if record is None else record.kind,
        finding.status,
        _sources(finding, record),
        tables,
        nodes.steps(steps, tables, kernels, costs),
        device,
        "" if finding.why is None else str(finding.why),
    )


def _sources(finding: Finding, record: Found | None) -> tuple[SourceLocation, ...]:
    """The lines that call a collection, or the one that defines what holds it."""
    own = finding.module.source if isinstance(finding.module, ConvertedCollection) else None
    source = own or finding.source
    call_sites = () if record is None else record.call_sites
    return call_sites or (() if source is None else (source,))


def _as_planned(
    finding: Finding, record: Found, planned: PlannedModel, costs: DrawnCosts, nodes: Nodes
) -> dict[str, Any]:
    """A collection as a plan would shard it."""
    made = planned.graphs[finding.path]
    context = made.graph.context.collections[finding.path]
    tables = tuple(map(declared_table, context.tables))
    (backend,) = (collection.backend for collection in planned.cost.planned if collection.name == finding.path)
    return drawn_collection(
        finding.paths,
        SHARDED[kind_of(finding.module)].__name__,
        record.kind,
        CONVERTED,
        _sources(finding, record),
        tables,
        nodes.steps(made.records, tables, _kernels_planned(made.graph, backend), costs),
        context.device,
    )


def _graph_of_collection(
    graph_module: fx.GraphModule, records: tuple[PassRecord, ...], costs: DrawnCosts, nodes: Nodes
) -> tuple[tuple[int, ...], tuple[dict[str, Any], ...]]:
    """What a picture shows of the graph of one collection by itself."""
    metas = [node.meta for node in records[-1].nodes if node.meta is not None]
    path, device = (metas[0].collection, metas[0].device) if metas else ("", "")
    source = metas[0].source if metas else None
    tables, made = declared_tables(graph_module), {meta.kind for meta in metas}
    kind = next((kind for kind in KINDS if kind.assembled_by in made), POOLED)
    steps, sources = (
        nodes.steps(records, tables, _kernels_now(graph_module), costs),
        () if source is None else (source,),
    )
    was = "collection"  # the graph does not know
    collection = drawn_collection(
        (path,), converted_class(kind).__name__, was, CONVERTED, sources, tables, steps, device
    )
    return (_lone_call(0, path, source, nodes),), (collection,)


def _lone_call(position: int, path: str, source: SourceLocation | None, nodes: Nodes) -> int:
    return nodes.place(path.replace(".", "_") or "ebc", CALL, path, source, collection=position)


def _graph_of_model(
    graph_module: fx.GraphModule, places: Mapping[int, int], costs: DrawnCosts, nodes: Nodes
) -> tuple[int, ...]:
    """The graph of a model around its collections, whose nodes are put together again, one call each."""
    calls = _find_calls(graph_module, places)
    inside: dict[fx.Node, _Call] = {node: call for call in calls for node in call.nodes}
    outer: dict[int, None] = {}
    for node in graph_module.graph.nodes:
        call = inside.get(node)
        sources = node.all_input_nodes if call is None else call.inputs
        inputs = tuple(dict.fromkeys(_name(source, inside) for source in sources))
        if call is None:
            kind = {"placeholder": INPUT, "output": OUTPUT}.get(node.op, DENSE)
            line, cost = format_node(graph_module, node), costs.place("", node.name)
            place = nodes.place(node.name, kind, line, source_of(node), inputs=inputs, cost=cost)
        else:
            line = f"{call.name} = {call.path}({', '.join(inputs)})"
            place = nodes.place(call.name, CALL, line, call.source, inputs=inputs, collection=call.collection)
        outer[place] = None
    return tuple(outer)


def _name(node: fx.Node, inside: Mapping[fx.Node, _Call]) -> str:
    call = inside.get(node)
    return node.name if call is None else call.name


def _kernels_now(graph_module: fx.GraphModule) -> dict[str, tuple[str, ...]]:
    """Which kernel serves each lookup of a graph now, and why, by name of the node."""
    kernels = {}
    for node in graph_module.graph.nodes:
        module = find_module(graph_module, node)
        lookup = module.lookup if isinstance(module, HashLookup) else module
        if isinstance(lookup, Lookup):
            try:
                choice = lookup.select(lookup.backend)
                kernels[node.name] = _why(choice.backend, choice.declined, lookup.backend)
            except ConversionError as error:
                kernels[node.name] = (f"none: {error.diagnostic.message}",)
    return kernels


def _kernels_planned(graph: OperatorGraph, asked: str) -> dict[str, tuple[str, ...]]:
    """Which kernel would serve each lookup of a planned graph, and why, with the backend that was asked for."""
    kernels = {}
    for node in graph.of_kind("lookup", "hash_lookup"):
        served = graph.served(node)
        kernels[node.name] = _why(served.backend, served.declined, asked)
    return kernels


def _why(backend: str, declined: Iterable[Diagnostic], asked: str) -> tuple[str, ...]:
    why_not = tuple(f"not {refusal.by}: {refusal.message}" for refusal in declined)
    if not backend:
        return (f"none: backend {asked!r} was asked for", *why_not)
    reason = "the backend that was asked for" if asked != "auto" else "the first that can serve these tables"
    return (f"{backend}: {reason}", *why_not)
