"""What a picture shows, as data: DOT, SVG and HTML are made from it."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.inspect.drawing.costs import NO_COSTS, DrawnCosts
from recfx.ir.meta import Collective, SourceLocation
from recfx.ir.node_kinds import NODE_KINDS, Stage

INPUT, OUTPUT, CALL, DENSE, ITEM = "input", "output", "call", "dense", "item"
"""Kinds of nodes that are not recfx's: the model's inputs and outputs, calls of collections, other nodes of the model,
and items of what a node of recfx's returns, which are drawn as edges."""

STAGES = ("select", "hash", "dist", "lookup", "dense", "io")
"""The groups of nodes that have a colour of their own; ``io`` are inputs and outputs."""

_STAGE_OF = {
    Stage.SELECT: "select",
    Stage.INPUT_DIST: "dist",
    Stage.HASH: "hash",
    Stage.LOOKUP: "lookup",
    Stage.OUTPUT_DIST: "dist",
    Stage.ASSEMBLE: "dense",
}


def stage_of(kind: str) -> str:
    """The group of a node kind, recfx's or not."""
    found = NODE_KINDS.get(kind)
    if found is not None and kind != "collection":
        return _STAGE_OF[found.stage]
    return "io" if kind in (INPUT, OUTPUT) else "lookup" if kind in ("collection", CALL) else "dense"


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
        tables: the tables that it works on.
        passes: the passes that made or changed it.
        collectives: the collective calls that it makes.
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
    tables: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()
    cost: int = -1
    source: SourceLocation | None = None
    collection: int = -1

    @property
    def stage(self) -> str:
        """The group that gives the node its colour."""
        return stage_of(self.kind)


@dataclass(frozen=True)
class DrawnTable:
    """One table of a collection; ``hashing`` is ``"static"``, ``"adopted"``, ``"index"`` or ``""``."""

    name: str
    features: tuple[str, ...]
    rows: int
    dim: int
    pooling: str
    dtype: str
    hashing: str


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
        shape: of its output, symbolic; ``""`` if it is not pooled.
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
    shape: str = ""
    why: str = ""
    device: str = ""
    sources: tuple[SourceLocation, ...] = ()
    tables: tuple[DrawnTable, ...] = ()
    steps: tuple[DrawnStep, ...] = ()

    @property
    def path(self) -> str:
        """The first name; ``""`` is the root."""
        return self.paths[0]

    @property
    def label(self) -> str:
        """The first name, with a word for that of the root."""
        return self.path or "(root)"

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
