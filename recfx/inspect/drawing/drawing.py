"""What a picture shows, as data."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from recfx.inspect import wording
from recfx.inspect.drawing.costs import NO_COSTS, DrawnCosts
from recfx.inspect.report_data import TableReport, type_name
from recfx.ir.meta import BATCH, SourceLocation, mean_length
from recfx.ir.node_kinds import NODE_KINDS, NOT_COMBINED, Stage
from recfx.ir.operator_graph import node_name
from recfx.passes.base import NodeSnapshot, PassRecord
from recfx.planner.pricing.cost_text import expression

INPUT, OUTPUT, CALL, DENSE, ITEM = "input", "output", "call", "dense", "item"
"""Kinds of nodes that are not recfx's: the model's inputs and outputs, calls of collections, other nodes of the model,
and items of what recfx's nodes return, which are drawn as edges."""

_STAGE_OF = {
    Stage.SELECT: "select",
    Stage.INPUT_DIST: "dist",
    Stage.HASH: "hash",
    Stage.LOOKUP: "lookup",
    Stage.OUTPUT_DIST: "dist",
    Stage.ASSEMBLE: "dense",
}


@dataclass(frozen=True)
class Drawing:
    """A model or a graph. Nodes and collections are as the script of the page reads them."""

    title: str
    subtitle: str  # versions, mode and rank
    nodes: Sequence[dict[str, Any]]  # of all steps
    outer: tuple[int, ...]  # those around the collections, with their calls; only the calls without a whole graph
    collections: tuple[dict[str, Any], ...]
    steps: tuple[str, ...]  # "before", then the passes
    costs: DrawnCosts = NO_COSTS  # of the nodes of the last step
    names: Mapping[str, str] = field(default_factory=dict)  # the user's name of each path, which wrappers lengthen
    report: str = ""  # the address of the report's page


class Nodes:
    """The nodes of a drawing, each once, however many steps it is the same in; what says nothing is left out."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self._places: dict[tuple[tuple[str, Any], ...], int] = {}
        self.text_of = functools.cache(source_text)  # of many nodes

    def place(self, name: str, kind: str, line: str = "", source: SourceLocation | None = None, **more: Any) -> int:
        """The position of a node, whose name is unique in its graph.

        Args:
            name: its name.
            kind: one of recfx's kinds, or one of the words above.
            line: as the text of the graph shows it.
            source: where the user's code makes it.
            more: ``inputs``, ``shape``, ``bytes``, ``dtype``, ``device`` and ``kernel``; ``why`` this kernel serves it,
                and why those before it do not; the positions of its ``tables`` in its collection; the ``passes`` that
                made or changed it; ``collectives``; the position of its ``cost`` among the costs of the drawing; and
                the position of the ``collection`` that a call calls. -1 if there is none.
        """
        line = f"{line[:400]} ... {line[-80:]}" if len(line) > 500 else line
        text = "" if source is None else self.text_of(source)
        fields = {"name": name, "kind": kind, "stage": _stage(kind), "line": line, "source": text, **more}
        node = {name: value for name, value in fields.items() if value not in ("", (), -1)}
        place = self._places.setdefault(tuple(node.items()), len(self.all))
        if place == len(self.all):
            self.all.append(node)
        return place

    def steps(
        self,
        records: Sequence[PassRecord],
        tables: Sequence[TableReport],
        kernels: Mapping[str, tuple[str, ...]],
        costs: DrawnCosts,
    ) -> list[dict[str, Any]]:
        """The graphs of a collection, pass by pass; ``costs`` are those of the last one.

        ``kernels`` says why each lookup has the kernel that it has, by name of the node. ``giver`` is the node whose
        value the graph returns, ``""`` if it returns its input, and ``input`` the name that nodes call the input by.
        """
        positions = {table.name: place for place, table in enumerate(tables)}
        steps = []
        for record in records:
            by_op = {node.op: node for node in record.nodes}
            inner = [node for node in record.nodes if node.op not in ("placeholder", "output")]
            output = by_op["output"].inputs if "output" in by_op else ()
            shown = costs if record is records[-1] else NO_COSTS
            steps.append(
                {
                    "name": record.name,
                    "modified": record.modified,
                    "nodes": [self._of_graph(node, positions, kernels, shown) for node in inner],
                    "giver": output[0] if output else "",
                    "input": by_op["placeholder"].name if "placeholder" in by_op else "",
                    "declined": [f"{refusal.code}: {refusal.message}" for refusal in record.declined],
                }
            )
        return steps

    def _of_graph(
        self, node: NodeSnapshot, positions: Mapping[str, int], kernels: Mapping[str, tuple[str, ...]],
        costs: DrawnCosts,
    ) -> int:  # fmt: skip
        meta = node.meta
        if meta is None:
            return self.place(node.name, ITEM, node.line, inputs=node.inputs)
        kernel = meta.kernel if costs.is_of(meta.device) else ""
        return self.place(
            node.name,
            meta.kind,
            node.line,
            meta.source,
            inputs=node.inputs,
            shape=_shape(meta.shape),
            bytes=_expression(meta.bytes),
            dtype="" if meta.dtype is None else type_name(meta.dtype),
            device=meta.device,
            kernel=kernel,
            why=kernels.get(node.name, ()) if kernel else (),
            # A shard is called after its table.
            tables=tuple(positions.get(name, positions.get(name.rpartition("@")[0], -1)) for name in meta.tables),
            passes=meta.passes,
            collectives=tuple(
                f"{call.operation} of {_expression(call.bytes)} bytes{', in the backward' if call.backward else ''}"
                for call in meta.collectives
            ),
            cost=costs.place(meta.collection, node.name),
        )


def drawn_collection(
    paths: Sequence[str],
    kind: str,
    was: str,
    status: str,
    sources: Iterable[SourceLocation],
    tables: Sequence[TableReport],
    steps: Sequence[dict[str, Any]],
    device: str = "",
    why: str = "",
) -> dict[str, Any]:
    """One collection.

    Args:
        paths: its names; ``""`` is the root.
        kind: the name of its class.
        was: the name of its class before conversion.
        status: as in the report.
        sources: the lines that call it, or the one that defines what holds it.
        tables: its tables.
        steps: its graph after each pass; none if it is not converted.
        device: where its tables are.
        why: why it is kept or refused.
    """
    is_pooled = all(table.pooling != NOT_COMBINED for table in tables)  # a row per sample, not one per id
    return {
        "paths": tuple(paths),
        "prefix": node_name(paths[0], ""),
        "kind": kind,
        "was": was,
        "shape": _output_shape(tables, is_pooled),
        "gives": "KeyedTensor" if is_pooled else "JaggedTensors",
        "status": status,
        "why": why,
        "device": device,
        "sources": [source_text(source) for source in sources],
        "tables": [
            [
                table.name, table.features, table.rows, table.dim, table.pooling, table.dtype,
                "" if table.hashing is None else table.hashing.mode,
            ]
            for table in tables
        ],
        "steps": steps,
    }  # fmt: skip


def source_text(source: SourceLocation) -> str:
    """``file:line``, and from where that is called, if it is not the user's own line."""
    place = wording.place_of(source.file, source.line)
    return place if source.called_from is None else f"{place}, called from {source_text(source.called_from)}"


def _stage(kind: str) -> str:
    """The group that gives a node its colour; ``io`` are inputs and outputs of the model."""
    known = NODE_KINDS.get(kind)
    if known is not None and kind != "collection":
        return _STAGE_OF[known.stage]
    return {INPUT: "io", OUTPUT: "io", CALL: "lookup", "collection": "lookup"}.get(kind, "dense")


def _output_shape(tables: Sequence[TableReport], is_pooled: bool) -> str:
    """Symbolic; ``""`` if it is not known."""
    if not tables or not all(table.pooling for table in tables):
        return ""
    features = [(table.dim, feature) for table in tables for feature in table.features]
    if is_pooled:
        return f"[B, {sum(dim for dim, _ in features)}]"
    ids = BATCH * sympy.Add(*(mean_length(feature) for _, feature in features))
    return _shape((ids, sympy.Integer(features[0][0])))


# The nodes of a collection have few different sizes.
_shape = functools.lru_cache(maxsize=4096)(wording.shape)
_expression = functools.lru_cache(maxsize=4096)(expression)
