"""From a model or a graph to what its page shows, as data. Looks only: nothing runs, changes or communicates."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn
from torchrec.distributed.types import ShardingPlan

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import SHARDED
from recfx.collections.whole_graph import WholeGraph
from recfx.collections.wrappers import unwrap, users_path
from recfx.discovery.classify import CONVERTED, Finding
from recfx.discovery.discover import discover
from recfx.discovery.shallow_tracer import source_of
from recfx.errors import DrawingError
from recfx.inspect.cost import priced_with_graphs
from recfx.inspect.describe import declared_tables
from recfx.inspect.drawing.costs import NO_COSTS, DrawnCosts, costs_of
from recfx.inspect.drawing.nodes import CALL, DENSE, INPUT, OUTPUT, Nodes, drawn_collection
from recfx.inspect.tables import Kernel, declared_table, kernels_of
from recfx.ir.meta import SourceLocation, find_module, node_meta
from recfx.ir.node_kinds import NODE_KINDS
from recfx.ir.printer import format_node
from recfx.passes import Rewriting
from recfx.passes.base import BEFORE, PASSES_KEY, PassRecord
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_facts import NOTHING_KNOWN, KnownBatch
from recfx.planner.pricing.planned_collection import graph_on
from recfx.planner.topology import AnyTopology, chip_of
from recfx.replacement.conversion_record import Found, conversion_of
from recfx.versions import __version__


def collect(
    subject: nn.Module,
    topology: AnyTopology | Hardware | None = None,
    plan: ShardingPlan | None = None,
    world_size: int | None = None,
    known: KnownBatch = NOTHING_KNOWN,
) -> dict[str, Any]:
    """What the page of a model or a graph shows, as the page's script reads it; ``known`` is where numbers start.

    Arguments as for ``recfx.draw``.

    Raises:
        DrawingError: ``no_collection``, ``already_sharded``; and what ``recfx.cost`` raises.
    """
    model = unwrap(subject)
    graph_module = model.graph_module if isinstance(model, WholeGraph) else model
    hardware = topology if isinstance(topology, Hardware) else None
    is_planned = plan is not None or world_size is not None or topology is not hardware
    nodes, outer = Nodes(), list[int]()
    inner = model.python_model if isinstance(model, WholeGraph) else model
    graphs: Mapping[str, Rewriting] = {}  # of collections that are not drawn as they are
    if is_planned:
        _refuse_other_plan(model)
        cost, graphs = priced_with_graphs(model, topology, plan, world_size)
        costs, findings = DrawnCosts(cost), discover(model).findings
    else:
        costs, findings = costs_of(model, hardware), discover(subject if inner is model else inner).findings
    records = {record.paths[0]: record for record in conversion_of(model).found}
    collections = [_collection(one, records.get(one.path), graphs.get(one.path), costs, nodes) for one in findings]
    if isinstance(graph_module, fx.GraphModule):
        outer += _graph_of_model(graph_module, findings, costs, nodes)
    called = {nodes.all[place].get("collection") for place in outer}
    for position, finding in enumerate(findings):
        if position not in called:
            source = next(iter(_sources(finding, records.get(finding.path))), None)
            name = finding.path.replace(".", "_") or "ebc"
            outer.append(nodes.place(name, CALL, finding.path, source, collection=position))
    if not collections:
        raise DrawingError(
            "there is no collection in the model, so there is nothing to draw.",
            reason="no_collection",
            what_to_do="pass the model that holds the collections of TorchRec, or its graph.",
        )
    steps = dict.fromkeys(step["name"] for collection in collections for step in collection["steps"])
    if not steps:
        costs = NO_COSTS  # of what a conversion would make, which is not drawn
    rank = f", rank 0 of {costs.cost.world_size} as planned" if is_planned else ""
    if not is_planned and dist.is_available() and dist.is_initialized():
        rank = f", rank {dist.get_rank()} of {dist.get_world_size()}"
    mode = "train" if graph_module.training else "eval"
    positions = {path: place for place, collection in enumerate(collections) for path in collection["paths"]}
    return {
        "title": type(inner).__name__,
        "subtitle": f"recfx {__version__}, torch {torch.__version__}, {mode} mode{rank}",
        "steps": [BEFORE, *steps],
        "nodes": nodes.all,  # of all steps
        "outer": outer,  # the nodes around the collections, with their calls; only the calls without a whole graph
        "collections": [one | {"paths": [users_path(subject, path) for path in one["paths"]]} for one in collections],
        "costs": costs.as_data(positions, known),
    }


def _refuse_other_plan(model: nn.Module) -> None:
    is_sharded = any(isinstance(module, ConvertedCollection) and module.is_sharded for module in model.modules())
    if is_sharded or isinstance(model, (fx.GraphModule, WholeGraph)):
        raise DrawingError(
            f"{'it' if is_sharded else 'a graph'} has its own plan, and cannot be drawn with another.",
            reason="already_sharded",
            what_to_do="leave out topology=, plan= and world_size=, or pass the model before it is sharded or a graph.",
        )


def _collection(
    finding: Finding, record: Found | None, made: Rewriting | None, costs: DrawnCosts, nodes: Nodes
) -> dict[str, Any]:
    """One collection as it is, or as the passes have ``made`` it for other ranks or for the device of the costs."""
    module, why = finding.module, finding.why
    kind, status, device = type(module).__name__, finding.status, str(getattr(module, "device", "") or "")
    tables, records, kernels = declared_tables(module), tuple[PassRecord, ...](), dict[str, Kernel]()
    was = kind if record is None else record.kind
    if isinstance(module, UnshardedCollection) and made is None and costs.device:
        made = graph_on(module, costs.device, chip_of(costs.cost.hardware, costs.device))
    if made is not None:
        (context,) = made.graph.context.collections.values()
        asked = module.backend if isinstance(module, UnshardedCollection) else "auto"
        for node in made.graph.of_kind("lookup", "hash_lookup"):
            served = made.graph.served(node)
            kernels[node.name] = Kernel((), asked, served.backend, served.declined)
        tables, records, device = tuple(map(declared_table, context.tables)), made.records, context.device
        if context.sharding is not None:
            kind, status, why = SHARDED[kind_of(module)].__name__, CONVERTED, None
    elif isinstance(module, ConvertedCollection):
        records = module.graph_module.meta.get(PASSES_KEY, ())  # of the mode that it is in
        kernels = kernels_of(module.graph_module)
    steps, sources = nodes.steps(records, tables, kernels, costs), _sources(finding, record)
    text = "" if why is None else str(why)
    return drawn_collection(
        finding.paths, kind, tables, steps, sources, was=was, status=status, device=device, why=text
    )


def _sources(finding: Finding, record: Found | None) -> tuple[SourceLocation, ...]:
    """The lines that call a collection, or the one that defines what holds it."""
    own = finding.module.source if isinstance(finding.module, ConvertedCollection) else None
    source = own or finding.source
    call_sites = () if record is None else record.call_sites
    return call_sites or (() if source is None else (source,))


class _Call(NamedTuple):
    """One call of a collection in the graph of a model."""

    name: str
    path: str
    nodes: list[fx.Node]
    inputs: list[fx.Node]  # from outside the call
    source: SourceLocation | None
    collection: int  # its position in the drawing


def _graph_of_model(
    graph_module: fx.GraphModule, findings: list[Finding], costs: DrawnCosts, nodes: Nodes
) -> list[int]:
    """The graph of a model around its collections, whose nodes are put together again, one call each."""
    calls = _find_calls(graph_module, {id(finding.module): position for position, finding in enumerate(findings)})
    inside = {node: call for call in calls for node in call.nodes}
    outer: dict[int, None] = {}
    for node in graph_module.graph.nodes:
        call = inside.get(node)
        sources = node.all_input_nodes if call is None else call.inputs
        inputs = tuple(dict.fromkeys(inside[one].name if one in inside else one.name for one in sources))
        if call is None:
            kind = {"placeholder": INPUT, "output": OUTPUT}.get(node.op, DENSE)
            line, cost = format_node(graph_module, node), costs.place("", node.name)
            place = nodes.place(node.name, kind, line, source_of(node), inputs=inputs, cost=cost)
        else:
            line = f"{call.name} = {call.path}({', '.join(inputs)})"
            place = nodes.place(call.name, CALL, line, call.source, inputs=inputs, collection=call.collection)
        outer[place] = None
    return list(outer)


def _find_calls(graph_module: fx.GraphModule, places: Mapping[int, int]) -> list[_Call]:
    """The calls; ``places`` has the position of each collection, by the ``id`` of its module."""
    modules = dict(graph_module.named_modules(remove_duplicate=False))
    calls = []
    for nodes in _inlined(graph_module):
        (first, meta), *_ = [(node, meta) for node in nodes if (meta := node_meta(node)) is not None]
        holder = modules.get(str(first.target).rpartition(".graph_module.")[0])
        own = set(nodes)
        inputs = [source for node in nodes for source in node.all_input_nodes if source not in own]
        name = first.name.removesuffix(f"_{meta.kind}") if first.name.endswith(meta.kind) else first.name
        position = places.get(id(holder), -1)
        calls.append(_Call(name, meta.collection, nodes, list(dict.fromkeys(inputs)), meta.source, position))
    for node in graph_module.graph.nodes:
        position = places.get(id(find_module(graph_module, node)), -1)
        calls.append(_Call(node.name, str(node.target), [node], node.all_input_nodes, source_of(node), position))
    return [call for call in calls if call.collection >= 0]


def _inlined(graph_module: fx.GraphModule) -> list[list[fx.Node]]:
    """The nodes of each inlined call: nodes of one collection between which values travel without leaving it."""
    together: dict[fx.Node, list[fx.Node]] = {}
    for node in graph_module.graph.nodes:
        collection = _collection_of_node(node)
        if collection is None:
            continue
        together[node] = [node]
        for source in node.all_input_nodes:
            if source in together and _collection_of_node(source) == collection:
                fewer, more = sorted((together[node], together[source]), key=len)
                if fewer is not more:
                    more += fewer
                    together |= dict.fromkeys(fewer, more)
    calls: dict[int, list[fx.Node]] = {}
    for node, call in together.items():
        calls.setdefault(id(call), []).append(node)
    return list(calls.values())


def _collection_of_node(node: fx.Node) -> str | None:
    """The collection that a node belongs to, which may be an item of what one of its nodes returns."""
    meta = node_meta(node)
    if meta is None and node.target is operator.getitem:
        meta = node_meta(node.all_input_nodes[0])
        if meta is not None and len(NODE_KINDS[meta.kind].outputs) == 1:
            return None  # the user's code takes a feature out of the output
    return None if meta is None else meta.collection
