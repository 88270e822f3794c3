"""What a picture shows, as data."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from recfx.inspect import wording
from recfx.inspect.drawing.costs import NO_COSTS, DrawnCosts
from recfx.inspect.reasons import type_name
from recfx.inspect.table_report import TableReport
from recfx.ir.meta import BATCH, SourceLocation, mean_length
from recfx.ir.names import node_name
from recfx.ir.node_kinds import NODE_KINDS, NOT_COMBINED, Stage
from recfx.ir.snapshot import NodeSnapshot, PassRecord
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
class DrawnNode:
    """One node; what is ``""``, ``()`` or -1 is not known, or says nothing."""

    name: str  # unique in its graph
    kind: str  # one of recfx's kinds, or one of the words above
    line: str = ""  # as the text of the graph shows it
    inputs: tuple[str, ...] = ()
    shape: str = ""
    bytes: str = ""
    dtype: str = ""
    device: str = ""
    kernel: str = ""
    why: tuple[str, ...] = ()  # why this kernel serves it, and why those before it do not
    tables: tuple[int, ...] = ()  # their positions in its collection
    passes: tuple[str, ...] = ()  # those that made or changed it
    collectives: tuple[str, ...] = ()
    cost: int = -1  # the position of what it costs among the costs of the drawing
    source: SourceLocation | None = None
    collection: int = -1  # the position of the collection that a call calls

    @property
    def stage(self) -> str:
        """The group that gives the node its colour; ``io`` are inputs and outputs of the model."""
        kind = NODE_KINDS.get(self.kind)
        if kind is not None and self.kind != "collection":
            return _STAGE_OF[kind.stage]
        return {INPUT: "io", OUTPUT: "io", CALL: "lookup", "collection": "lookup"}.get(self.kind, "dense")


@dataclass(frozen=True)
class DrawnStep:
    """The graph of a collection after a pass."""

    name: str
    modified: bool
    nodes: tuple[DrawnNode, ...]  # without input and output
    giver: str  # the node whose value the graph returns; "" if it returns its input
    input: str  # the name by which nodes refer to the input of the graph
    declined: tuple[str, ...] = ()


@dataclass(frozen=True)
class DrawnCollection:
    """One collection."""

    paths: tuple[str, ...]
    kind: str  # the name of its class
    was: str  # the name of its class before conversion
    status: str  # as in the report
    why: str = ""  # why it is kept or refused
    device: str = ""
    sources: tuple[SourceLocation, ...] = ()  # the lines that call it, or the one that defines what holds it
    tables: tuple[TableReport, ...] = ()
    steps: tuple[DrawnStep, ...] = ()  # its graph after each pass; none if it is not converted

    @property
    def path(self) -> str:
        """The first name; ``""`` is the root."""
        return self.paths[0]

    @property
    def label(self) -> str:
        """The first name, or a word for the root, whose name is empty."""
        return self.path or "(root)"

    @property
    def prefix(self) -> str:
        """What the names of its nodes begin with."""
        return node_name(self.path, "")

    @property
    def is_pooled(self) -> bool:
        """Whether its output has one row per sample, and not one per id."""
        return all(table.pooling != NOT_COMBINED for table in self.tables)

    @property
    def gives(self) -> str:
        """The type of its output."""
        return "KeyedTensor" if self.is_pooled else "JaggedTensors"

    @property
    def shape(self) -> str:
        """The shape of its output, symbolic; ``""`` if it is not known."""
        if not self.tables or not all(table.pooling for table in self.tables):
            return ""
        features = [(table.dim, feature) for table in self.tables for feature in table.features]
        if self.is_pooled:
            return f"[B, {sum(dim for dim, _ in features)}]"
        ids = BATCH * sympy.Add(*(mean_length(feature) for _, feature in features))
        return _shape((ids, sympy.Integer(features[0][0])))

    def at(self, step: str, order: tuple[str, ...]) -> DrawnStep | None:
        """Its graph after ``step``, or after its own last pass before that; None before the first."""
        done = set(order[: order.index(step) + 1])
        return next((own for own in reversed(self.steps) if own.name in done), None)


@dataclass(frozen=True)
class Drawing:
    """A model or a graph."""

    title: str
    subtitle: str  # versions, mode and rank
    nodes: tuple[DrawnNode, ...]  # around the collections, with their calls; only the calls without a whole graph
    collections: tuple[DrawnCollection, ...]
    steps: tuple[str, ...]  # "before", then the passes
    costs: DrawnCosts = NO_COSTS  # of the nodes of the last step
    names: Mapping[str, str] = field(default_factory=dict)  # the user's name of each path, which wrappers lengthen
    report: str = ""  # the address of the report's page


def drawn_steps(
    records: Sequence[PassRecord],
    tables: Sequence[TableReport],
    kernels: Mapping[str, tuple[str, ...]],
    costs: DrawnCosts,
) -> tuple[DrawnStep, ...]:
    """The graphs of a collection, pass by pass; ``costs`` are those of the last one.

    ``kernels`` says why each lookup has the kernel that it has, by name of the node.
    """
    positions = {table.name: place for place, table in enumerate(tables)}
    steps = []
    for record in records:
        by_op = {node.op: node for node in record.nodes}
        inner = [node for node in record.nodes if node.op not in ("placeholder", "output")]
        output = by_op["output"].inputs if "output" in by_op else ()
        shown = costs if record is records[-1] else NO_COSTS
        steps.append(
            DrawnStep(
                name=record.name,
                modified=record.modified,
                nodes=tuple(_node(node, positions, kernels, shown) for node in inner),
                giver=output[0] if output else "",
                input=by_op["placeholder"].name if "placeholder" in by_op else "",
                declined=tuple(f"{refusal.code}: {refusal.message}" for refusal in record.declined),
            )
        )
    return tuple(steps)


def _node(
    node: NodeSnapshot, positions: Mapping[str, int], kernels: Mapping[str, tuple[str, ...]], costs: DrawnCosts
) -> DrawnNode:
    meta = node.meta
    if meta is None:
        return DrawnNode(node.name, ITEM, node.line, node.inputs)
    kernel = meta.kernel if costs.is_of(meta.device) else ""
    return DrawnNode(
        name=node.name,
        kind=meta.kind,
        line=node.line,
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
        source=meta.source,
    )


# The nodes of a collection have few different sizes.
_shape = functools.lru_cache(maxsize=4096)(wording.shape)
_expression = functools.lru_cache(maxsize=4096)(expression)
