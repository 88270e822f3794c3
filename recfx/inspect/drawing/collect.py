"""From a model or a graph to what its page shows, as data that the page's script reads. Looks only: nothing runs,
changes or communicates.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch
import torch.distributed as dist
from torch import fx, nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import SHARDED
from recfx.collections.whole_graph import WholeGraph
from recfx.collections.wrappers import unwrap, users_path
from recfx.errors import DrawingError
from recfx.inspect.cost import cost
from recfx.inspect.describe import declared_tables
from recfx.inspect.drawing.costs import NO_COSTS, DrawnCosts, costs_of
from recfx.inspect.report_data import NodeReport, TableReport, place_of, shape_text
from recfx.inspect.tables import Kernel, declared_table, kernels_of
from recfx.ir.meta import BATCH, CALL_KEY, SourceLocation, mean_length, node_meta
from recfx.ir.node_kinds import NODE_KINDS, NOT_COMBINED, Stage
from recfx.ir.operator_graph import node_name
from recfx.ir.printer import attributes_text, format_call, format_node
from recfx.models.classify import CONVERTED, Finding
from recfx.models.conversion_record import Found, conversion_of
from recfx.models.discover import discover
from recfx.models.trace_graph import source_of
from recfx.passes import Rewriting
from recfx.passes.base import BEFORE, PASSES_KEY, PassRecord
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.step_price import graph_on
from recfx.planner.pricing.work import expression
from recfx.versions import __version__

INPUT, OUTPUT, CALL, DENSE, ITEM = "input", "output", "call", "dense", "item"
"""Kinds of nodes that are not recfx's: the model's inputs and outputs, calls of collections, other nodes of the model,
and items of what recfx's nodes return, which are drawn as edges."""

_STAGES = {INPUT: "io", OUTPUT: "io", CALL: "lookup", "collection": "lookup", DENSE: "dense", ITEM: "dense"}
_STAGE_OF = {
    Stage.SELECT: "select",
    Stage.INPUT_DIST: "dist",
    Stage.HASH: "hash",
    Stage.LOOKUP: "lookup",
    Stage.OUTPUT_DIST: "dist",
    Stage.ASSEMBLE: "dense",
}
"""The groups that give nodes their colours; ``io`` are inputs and outputs of the model."""


def collect(
    subject: nn.Module,
    topology: Topology | Hardware | None = None,
    plan: ShardingPlan | None = None,
    world_size: int | None = None,
    sample: Any = None,
) -> dict[str, Any]:
    """What the page of a model or a graph shows, as the page's script reads it; numbers start from ``sample``."""
    model = unwrap(subject)
    graph_module = model.graph_module if isinstance(model, WholeGraph) else model
    hardware = topology if isinstance(topology, Hardware) else None
    is_planned = plan is not None or world_size is not None or topology is not hardware
    nodes, outer = _Nodes(), list[int]()
    inner = model.python_model if isinstance(model, WholeGraph) else model
    graphs: Mapping[str, Rewriting] = {}  # of collections that are not drawn as they are
    if is_planned:
        _refuse_other_plan(model)
        costs = DrawnCosts(cost(model, topology, plan=plan, world_size=world_size, sample=sample))
        graphs = {part.context.name: part.rewriting(rank=0) for part in costs.cost.planned}
        findings = discover(model).findings
    else:
        costs, findings = costs_of(model, hardware, sample), discover(subject if inner is model else inner).findings
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
        "costs": costs.as_data(positions),
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
    finding: Finding, record: Found | None, made: Rewriting | None, costs: DrawnCosts, nodes: _Nodes
) -> dict[str, Any]:
    """One collection as it is, or as the passes have ``made`` it for other ranks or for the device of the costs."""
    module, why = finding.module, finding.why
    kind, status, device = type(module).__name__, finding.status, str(getattr(module, "device", "") or "")
    tables, records, kernels = declared_tables(module), tuple[PassRecord, ...](), dict[str, Kernel]()
    was = kind if record is None else record.kind
    if isinstance(module, UnshardedCollection) and made is None and costs.device:
        made = graph_on(module, costs.device)
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
    positions = {table.name: place for place, table in enumerate(tables)}
    steps = [nodes.of_step(one, positions, kernels, costs, one is records[-1]) for one in records]
    is_pooled = all(table.pooling != NOT_COMBINED for table in tables)  # a row per sample, not one per id
    return {
        "paths": tuple(finding.paths),  # its names; "" is the root
        "prefix": node_name(finding.path, ""),
        "kind": kind,
        "shape": _output_shape(tables, is_pooled),
        "gives": "KeyedTensor" if is_pooled else "JaggedTensors",
        "sources": list(map(source_text, _sources(finding, record))),
        "tables": [
            [
                table.name, table.features, table.rows, table.dim, table.pooling, table.dtype,
                "" if table.hashing is None else table.hashing.mode,
            ]
            for table in tables
        ],
        "steps": steps,  # after each pass; none if it is not converted
        "was": was,  # its class before the conversion
        "status": status,
        "device": device,
        "why": "" if why is None else str(why),
    }  # fmt: skip


def _sources(finding: Finding, record: Found | None) -> tuple[SourceLocation, ...]:
    """The lines that call a collection, or the one that defines what holds it."""
    own = finding.module.source if isinstance(finding.module, ConvertedCollection) else None
    source = own or finding.source
    call_sites = () if record is None else record.call_sites
    return call_sites or (() if source is None else (source,))


class _Nodes:
    """The nodes of a drawing, each once, however many steps it is the same in; what says nothing is left out."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self._places: dict[tuple[tuple[str, Any], ...], int] = {}
        self._source_text = functools.cache(source_text)  # of many nodes

    def place(self, name: str, kind: str, line: str = "", source: SourceLocation | None = None, **more: Any) -> int:
        """The position of a node, whose name is unique in its graph; ``more`` is what else the page shows of it."""
        line = f"{line[:400]} ... {line[-80:]}" if len(line) > 500 else line
        text = "" if source is None else self._source_text(source)
        stage = _STAGES[kind] if kind in _STAGES else _STAGE_OF[NODE_KINDS[kind].stage]
        fields = {"name": name, "kind": kind, "stage": stage, "line": line, "source": text, **more}
        node = {name: value for name, value in fields.items() if value not in ("", (), -1)}
        place = self._places.setdefault(tuple(node.items()), len(self.all))
        if place == len(self.all):
            self.all.append(node)
        return place

    def of_step(
        self,
        record: PassRecord,
        positions: Mapping[str, int],
        kernels: Mapping[str, Kernel],
        costs: DrawnCosts,
        is_last: bool,
    ) -> dict[str, Any]:
        """A graph after a pass, which returns the node ``giver``; ``kernels`` and ``costs`` are of the last pass."""
        by_op = {node.op: node for node in record.graph.graph.nodes}
        inner = [node for node in record.graph.graph.nodes if node.op not in ("placeholder", "output")]

        def place(node: fx.Node) -> int:
            meta, line = record.metas.get(node.name), format_call(node) + attributes_text(record.graph, node)
            inputs = tuple(source.name for source in node.all_input_nodes)
            if meta is None:
                return self.place(node.name, ITEM, line, inputs=inputs)
            report = NodeReport.of(node.name, meta)
            return self.place(
                node.name,
                meta.kind,
                line,
                meta.source,
                inputs=inputs,
                shape=shape_text(report.shape),
                bytes=expression(report.bytes),
                dtype=report.dtype,
                device=report.device,
                kernel=report.kernel,
                why=_why(kernels[node.name]) if node.name in kernels else (),
                # A shard is called after its table.
                tables=tuple(positions.get(name, positions.get(name.rpartition("@")[0], -1)) for name in meta.tables),
                passes=meta.passes,
                collectives=tuple(
                    f"{call.operation} of {expression(call.bytes)} bytes{', in the backward' if call.backward else ''}"
                    for call in meta.collectives
                ),
                cost=costs.place(meta.collection, node.name) if is_last else -1,
            )

        return {
            "name": record.name,
            "modified": record.modified,
            "nodes": [place(node) for node in inner],
            "giver": next((node.name for node in by_op["output"].all_input_nodes), ""),
            "input": by_op["placeholder"].name,
            "declined": [f"{refusal.code}: {refusal.message}" for refusal in record.declined],
        }


def _why(kernel: Kernel) -> tuple[str, ...]:
    """Which kernel serves a lookup, and why."""
    if kernel.refused is not None:
        return (f"none: {kernel.refused.message}",)
    why_not = tuple(f"not {refusal.by}: {refusal.message}" for refusal in kernel.passed_over)
    if not kernel.name:
        return (f"none: backend {kernel.asked!r} was asked for", *why_not)
    reason = "the backend that was asked for" if kernel.asked != "auto" else "the first that can serve these tables"
    return (f"{kernel.name}: {reason}", *why_not)


def source_text(source: SourceLocation) -> str:
    """``file:line``, and from where that is called, if it is not the user's own line."""
    place = place_of(source.file, source.line)
    return place if source.called_from is None else f"{place}, called from {source_text(source.called_from)}"


def _output_shape(tables: Sequence[TableReport], is_pooled: bool) -> str:
    """Symbolic; ``""`` if it is not known."""
    if not tables or not all(table.pooling for table in tables):
        return ""
    features = [(table.dim, feature) for table in tables for feature in table.features]
    if is_pooled:
        return f"[B, {sum(dim for dim, _ in features)}]"
    ids = BATCH * sympy.Add(*(mean_length(feature) for _, feature in features))
    return shape_text((ids, sympy.Integer(features[0][0])))


class _Call(NamedTuple):
    """One call of a collection in the graph of a model."""

    name: str
    path: str
    nodes: list[fx.Node]
    source: SourceLocation | None
    collection: int  # its position in the drawing


def _graph_of_model(
    graph_module: fx.GraphModule, findings: list[Finding], costs: DrawnCosts, nodes: _Nodes
) -> list[int]:
    """The graph of a model around its collections, whose nodes are put together again, one call each."""
    inside = _find_calls(graph_module, {id(finding.module): position for position, finding in enumerate(findings)})
    outer: dict[int, None] = {}
    for node in graph_module.graph.nodes:
        call = inside.get(node)
        sources = [source for one in (call.nodes if call else [node]) for source in one.all_input_nodes]
        named = (
            inside[one].name if one in inside else one.name for one in sources if call is not inside.get(one, node)
        )
        inputs = tuple(dict.fromkeys(named))
        if call is None:
            kind = {"placeholder": INPUT, "output": OUTPUT}.get(node.op, DENSE)
            line, cost = format_node(graph_module, node), costs.place("", node.name)
            place = nodes.place(node.name, kind, line, source_of(node), inputs=inputs, cost=cost)
        else:
            line = f"{call.name} = {call.path}({', '.join(inputs)})"
            place = nodes.place(call.name, CALL, line, call.source, inputs=inputs, collection=call.collection)
        outer[place] = None
    return list(outer)


def _find_calls(graph_module: fx.GraphModule, places: Mapping[int, int]) -> dict[fx.Node, _Call]:
    """The call that each node is, or is a part of; ``places``: the position of each collection, by ``id``."""
    modules = dict(graph_module.named_modules(remove_duplicate=False))
    calls: dict[str, _Call] = {}
    inside = {}
    for node in graph_module.graph.nodes:
        name, path = node.meta.get(CALL_KEY, (node.name, str(node.target)))
        position = places.get(id(modules.get(path)), -1) if CALL_KEY in node.meta or node.op == "call_module" else -1
        if position >= 0:
            meta = node_meta(node)
            source = source_of(node) if meta is None else meta.source
            inside[node] = calls.setdefault(name, _Call(name, path, [], source, position))
            inside[node].nodes.append(node)
    return inside
