"""The nodes and collections of a drawing, as the page's script reads them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy

from recfx.inspect.drawing.costs import DrawnCosts
from recfx.inspect.report_data import NodeReport, TableReport, place_of, shape_text
from recfx.inspect.tables import Kernel
from recfx.ir.meta import BATCH, SourceLocation, mean_length
from recfx.ir.node_kinds import NODE_KINDS, NOT_COMBINED, Stage
from recfx.ir.operator_graph import node_name
from recfx.passes.base import NodeSnapshot, PassRecord
from recfx.planner.pricing.cost_text import expression

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


class Nodes:
    """The nodes of a drawing, each once, however many steps it is the same in; what says nothing is left out."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self._places: dict[tuple[tuple[str, Any], ...], int] = {}
        self._source_text = functools.cache(source_text)  # of many nodes

    def place(self, name: str, kind: str, line: str = "", source: SourceLocation | None = None, **more: Any) -> int:
        """The position of a node, whose name is unique in its graph.

        Args:
            name: its name.
            kind: one of recfx's kinds, or one of the words above.
            line: as the text of the graph shows it.
            source: where the user's code makes it.
            more: what else the page shows; -1 stands for no position.
        """
        line = f"{line[:400]} ... {line[-80:]}" if len(line) > 500 else line
        text = "" if source is None else self._source_text(source)
        stage = _STAGES[kind] if kind in _STAGES else _STAGE_OF[NODE_KINDS[kind].stage]
        fields = {"name": name, "kind": kind, "stage": stage, "line": line, "source": text, **more}
        node = {name: value for name, value in fields.items() if value not in ("", (), -1)}
        place = self._places.setdefault(tuple(node.items()), len(self.all))
        if place == len(self.all):
            self.all.append(node)
        return place

    def steps(
        self,
        records: Sequence[PassRecord],
        tables: Sequence[TableReport],
        kernels: Mapping[str, Kernel],
        costs: DrawnCosts,
    ) -> list[dict[str, Any]]:
        """The graphs of a collection, pass by pass; ``kernels``, by name of the node, and ``costs`` are those of the
        last one.

        ``giver`` is the node whose value the graph returns, ``""`` if it returns its input, and ``input`` the name that
        nodes call the input by.
        """
        positions = {table.name: place for place, table in enumerate(tables)}
        steps = []
        for record in records:
            by_op = {node.op: node for node in record.nodes}
            output = by_op["output"].inputs if "output" in by_op else ()
            is_last = record is records[-1]
            steps.append(
                {
                    "name": record.name,
                    "modified": record.modified,
                    "nodes": [
                        self._of_graph(node, positions, kernels, costs, is_last)
                        for node in record.nodes
                        if node.op not in ("placeholder", "output")
                    ],
                    "giver": output[0] if output else "",
                    "input": by_op["placeholder"].name if "placeholder" in by_op else "",
                    "declined": [f"{refusal.code}: {refusal.message}" for refusal in record.declined],
                }
            )
        return steps

    def _of_graph(
        self, node: NodeSnapshot, positions: Mapping[str, int], kernels: Mapping[str, Kernel], costs: DrawnCosts,
        is_last: bool,
    ) -> int:  # fmt: skip
        meta = node.meta
        if meta is None:
            return self.place(node.name, ITEM, node.line, inputs=node.inputs)
        report = NodeReport.of(node.name, meta)
        kernel = report.kernel if costs.is_of(report.device) else ""
        return self.place(
            node.name,
            meta.kind,
            node.line,
            meta.source,
            inputs=node.inputs,
            shape=_shape(report.shape),
            bytes=_expression(report.bytes),
            dtype=report.dtype,
            device=report.device,
            kernel=kernel,
            why=_why(kernels[node.name]) if kernel and node.name in kernels else (),
            # A shard is called after its table.
            tables=tuple(positions.get(name, positions.get(name.rpartition("@")[0], -1)) for name in meta.tables),
            passes=meta.passes,
            collectives=tuple(
                f"{call.operation} of {_expression(call.bytes)} bytes{', in the backward' if call.backward else ''}"
                for call in meta.collectives
            ),
            cost=costs.place(meta.collection, node.name) if is_last else -1,
        )


def _why(kernel: Kernel) -> tuple[str, ...]:
    """Which kernel serves a lookup, and why."""
    if kernel.refused is not None:
        return (f"none: {kernel.refused.message}",)
    why_not = tuple(f"not {refusal.by}: {refusal.message}" for refusal in kernel.passed_over)
    if not kernel.name:
        return (f"none: backend {kernel.asked!r} was asked for", *why_not)
    reason = "the backend that was asked for" if kernel.asked != "auto" else "the first that can serve these tables"
    return (f"{kernel.name}: {reason}", *why_not)


def drawn_collection(
    paths: Sequence[str],
    kind: str,
    tables: Sequence[TableReport],
    steps: Sequence[dict[str, Any]],
    sources: Iterable[SourceLocation],
    **more: str,
) -> dict[str, Any]:
    """One collection.

    Args:
        paths: its names; ``""`` is the root.
        kind: the name of its class.
        tables: its tables.
        steps: its graph after each pass; none if it is not converted.
        sources: the lines that call it, or the one that defines what holds it.
        more: ``status``, ``device`` and ``why`` as in the report, and ``was``, the class before conversion.
    """
    is_pooled = all(table.pooling != NOT_COMBINED for table in tables)  # a row per sample, not one per id
    return {
        "paths": tuple(paths),
        "prefix": node_name(paths[0], ""),
        "kind": kind,
        "shape": _output_shape(tables, is_pooled),
        "gives": "KeyedTensor" if is_pooled else "JaggedTensors",
        "sources": [source_text(source) for source in sources],
        "tables": [
            [
                table.name, table.features, table.rows, table.dim, table.pooling, table.dtype,
                "" if table.hashing is None else table.hashing.mode,
            ]
            for table in tables
        ],
        "steps": steps,
        "why": "",
        **more,
    }  # fmt: skip


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
    return _shape((ids, sympy.Integer(features[0][0])))


# The nodes of a collection have few different sizes.
_shape = functools.lru_cache(maxsize=4096)(shape_text)
_expression = functools.lru_cache(maxsize=4096)(expression)
