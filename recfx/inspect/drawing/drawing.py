"""What a picture shows, as data: DOT, SVG and HTML are made from it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recfx.inspect import wording
from recfx.inspect.drawing.costs import NO_COSTS, DrawnCosts
from recfx.inspect.table_report import TableReport
from recfx.ir.meta import SourceLocation
from recfx.ir.names import node_name
from recfx.ir.node_kinds import NODE_KINDS, Stage
from recfx.ir.snapshot import NodeSnapshot, PassRecord

INPUT, OUTPUT, CALL, DENSE, ITEM = "input", "output", "call", "dense", "item"
"""Kinds of nodes that are not recfx's: the model's inputs and outputs, calls of collections, other nodes of the model,
and items of what a node of recfx's returns, which are drawn as edges."""

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
    """One node.

    Args:
        name: unique in its graph.
        kind: a node kind of recfx's, or one of the words above.
        line: the node as the text of the graph shows it.
        inputs: names of the nodes whose values it takes.
        shape: of its value, symbolic; ``""`` if unknown.
        bytes: size of its value, symbolic.
        dtype: of its value.
        device: of its value.
        kernel: the backend that serves it, once lowered.
        why: why this backend serves it, and why those before it do not.
        tables: the positions of the tables that it works on among those of its collection.
        passes: the passes that made or changed it.
        collectives: the collective calls that it makes, in words.
        cost: the position of what it costs per step among the costs of the drawing; -1 if that is not known.
        source: the line of the user's code that it comes from.
        collection: for a call, the position of the collection among those of the drawing; otherwise -1.
    """

    name: str
    kind: str
    line: str = ""
    inputs: tuple[str, ...] = ()
    shape: str = ""
    bytes: str = ""
    dtype: str = ""
    device: str = ""
    kernel: str = ""
    why: tuple[str, ...] = ()
    tables: tuple[int, ...] = ()
    passes: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    cost: int = -1
    source: SourceLocation | None = None
    collection: int = -1

    @property
    def stage(self) -> str:
        """The group that gives the node its colour; ``io`` are inputs and outputs of the model."""
        kind = NODE_KINDS.get(self.kind)
        if kind is not None and self.kind != "collection":
            return _STAGE_OF[kind.stage]
        return {INPUT: "io", OUTPUT: "io", CALL: "lookup", "collection": "lookup"}.get(self.kind, "dense")


@dataclass(frozen=True)
class DrawnStep:
    """The graph of a collection after a pass.

    Args:
        name: the pass.
        modified: whether the pass changed the graph.
        nodes: the nodes, without input and output.
        giver: name of the node whose value the graph returns; ``""`` if it returns its input.
        input: the name by which nodes refer to the input of the graph.
        declined: what the pass did not rewrite, and why.
    """

    name: str
    modified: bool
    nodes: tuple[DrawnNode, ...]
    giver: str
    input: str
    declined: tuple[str, ...] = ()


@dataclass(frozen=True)
class DrawnCollection:
    """One collection.

    Args:
        paths: every fully qualified name it has.
        kind: name of its class.
        was: name of its class before conversion.
        status: ``"converted"``, ``"convertible"``, ``"kept"`` or ``"refused"``.
        why: why it is kept or refused; otherwise ``""``.
        device: of its tables.
        sources: the lines of the user's code that call it, or the one that defines what holds it.
        tables: its tables.
        steps: its graph after each pass; none if it is not converted.
    """

    paths: tuple[str, ...]
    kind: str
    was: str
    status: str
    why: str = ""
    device: str = ""
    sources: tuple[SourceLocation, ...] = ()
    tables: tuple[TableReport, ...] = ()
    steps: tuple[DrawnStep, ...] = ()

    @property
    def path(self) -> str:
        """The first name; ``""`` is the root."""
        return self.paths[0]

    @property
    def label(self) -> str:
        """The first name, with a word for that of the root."""
        return self.path or "(root)"

    @property
    def prefix(self) -> str:
        """What the names of its nodes begin with."""
        return node_name(self.path, "")

    @property
    def shape(self) -> str:
        """The shape of its output, symbolic; ``""`` if it is not pooled."""
        if not self.tables or not all(table.pooling for table in self.tables):
            return ""
        return f"[B, {sum(table.dim * len(table.features) for table in self.tables)}]"

    def at(self, step: str, order: tuple[str, ...]) -> DrawnStep | None:
        """Its graph after ``step``, or after the last of its own passes before that; None before the first one.

        Args:
            step: the name of a step.
            order: the names of all steps.
        """
        done = set(order[: order.index(step) + 1])
        return next((each for each in reversed(self.steps) if each.name in done), None)


@dataclass(frozen=True)
class Drawing:
    """A model or a graph.

    Args:
        title: what it is.
        subtitle: versions, mode and rank.
        nodes: the graph around the collections, in order; a collection's call is one node of it. Without a graph of the
            whole model, there are only the calls.
        collections: the collections.
        steps: the names of all steps, in order: ``before``, then the passes.
        costs: what the nodes of the last step cost.
    """

    title: str
    subtitle: str
    nodes: tuple[DrawnNode, ...]
    collections: tuple[DrawnCollection, ...]
    steps: tuple[str, ...]
    costs: DrawnCosts = NO_COSTS

    @property
    def converted(self) -> bool:
        """Whether there is anything after ``before``."""
        return len(self.steps) > 1


def drawn_steps(
    records: Sequence[PassRecord],
    tables: Sequence[TableReport],
    kernels: Mapping[str, tuple[str, ...]],
    costs: DrawnCosts,
) -> tuple[DrawnStep, ...]:
    """The graphs of a collection, pass by pass.

    Args:
        records: of the passes, in order.
        tables: those of the collection.
        kernels: why each lookup has the kernel that it has, by name of the node.
        costs: of the nodes of the graph that the passes have made.
    """
    positions, last = {table.name: place for place, table in enumerate(tables)}, len(records) - 1
    return tuple(
        _step(record, positions, kernels, costs if place == last else NO_COSTS) for place, record in enumerate(records)
    )


def _step(
    record: PassRecord, positions: Mapping[str, int], kernels: Mapping[str, tuple[str, ...]], costs: DrawnCosts
) -> DrawnStep:
    by_op = {node.op: node for node in record.nodes}
    inner = [node for node in record.nodes if node.op not in ("placeholder", "output")]
    output = by_op["output"].inputs if "output" in by_op else ()
    return DrawnStep(
        name=record.name,
        modified=record.modified,
        nodes=tuple(_node(node, positions, kernels, costs) for node in inner),
        giver=output[0] if output else "",
        input=by_op["placeholder"].name if "placeholder" in by_op else "",
        declined=tuple(f"{one.code}: {one.message}" for one in record.declined),
    )


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
        dtype="" if meta.dtype is None else str(meta.dtype).removeprefix("torch."),
        device=meta.device,
        kernel=kernel,
        why=kernels.get(node.name, ()) if kernel else (),
        # A shard is called after its table.
        tables=tuple(positions.get(name, positions.get(name.rpartition("@")[0], -1)) for name in meta.tables),
        passes=meta.passes,
        collectives=tuple(
            f"{each.operation} of {_expression(each.bytes)} bytes{', in the backward' if each.backward else ''}"
            for each in meta.collectives
        ),
        cost=costs.place(meta.collection, node.name),
        source=meta.source,
    )


# The nodes of a collection have few different sizes.
_shape = functools.lru_cache(maxsize=4096)(wording.shape)
_expression = functools.lru_cache(maxsize=4096)(wording.expression)
