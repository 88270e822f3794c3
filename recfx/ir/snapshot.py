"""What a graph was like after a pass: later passes rewrite the graph in place, and its snapshots stay.

Comparing the nodes before and after a pass also tells which nodes the pass has touched, whatever it did to them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import fx

from recfx.errors import Diagnostic
from recfx.ir.meta import NodeMeta
from recfx.ir.node_kinds import NODE_KINDS
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.printer import format_meta


@dataclass(frozen=True)
class NodeSnapshot:
    """One node of a graph as it was.

    Args:
        name: its name then.
        op: torch.fx's word for what it does, such as ``"call_module"``.
        line: its line in the text of the graph.
        inputs: the names of the nodes whose values it takes.
        meta: its metadata; None for a node that recfx did not make.
    """

    name: str
    op: str
    line: str
    inputs: tuple[str, ...]
    meta: NodeMeta | None

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeSnapshot:
        return self  # it is frozen, so copies of a model share it


@dataclass(frozen=True)
class PassRecord:
    """What a pass did, for the report and for drawings.

    Args:
        name: that of the pass.
        modified: whether it changed the graph.
        nodes: the nodes of the graph after the pass.
        declined: what it did not rewrite, and why.
        seconds: how long it took, with the check of the graph after it.
    """

    name: str
    modified: bool
    nodes: tuple[NodeSnapshot, ...]
    declined: tuple[Diagnostic, ...]
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The graph after the pass, as ``format_graph`` prints it."""
        return "\n".join(node.line for node in self.nodes)

    @property
    def text_with_meta(self) -> str:
        """The text of the graph with the metadata of each node."""
        return "\n".join(node.line + format_meta(node.meta) for node in self.nodes)

    def __deepcopy__(self, memo: dict[int, Any]) -> PassRecord:
        return self  # it is frozen, so copies of a model share it


BEFORE = "before"
"""The name of the step before the first pass; every other step has the name of its pass."""

PASSES_KEY = "recfx_passes"
"""Where a graph module's ``meta`` has the records of the passes that made it."""


@dataclass(frozen=True)
class Rewriting:
    """What passes have made of a graph.

    Args:
        graph: the graph after the last one.
        records: what each of them did.
        metas: the metadata of the graph's nodes, by name.
    """

    graph: OperatorGraph
    records: tuple[PassRecord, ...]
    metas: Mapping[str, NodeMeta]

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewriting:
        return self  # nothing edits it, so copies of a model share it


class Readable(Protocol):
    """A graph, as its history reads it."""

    @property
    def nodes(self) -> Iterable[fx.Node]:
        """Its nodes, in order."""
        ...

    def meta(self, node: fx.Node, is_new: bool, pass_name: str) -> NodeMeta | None:
        """The metadata of a node after a pass; None for a node that recfx did not make."""
        ...

    def attributes(self, node: fx.Node) -> str:
        """What the line of a node says behind its call."""
        ...

    def call(self, node: fx.Node) -> str:
        """The line of a node up to there."""
        ...

    def work(self, node: fx.Node) -> frozenset[tuple[str, str]]:
        """What the node does, by table: a node that does the same takes the place of one that has gone."""
        ...

    def note(self, node: fx.Node, meta: NodeMeta) -> None:
        """Take over the metadata of a node with the passes that touched it."""
        ...


@dataclass(frozen=True)
class _Seen:
    """A node before a pass: what the pass may change of it, and the work that it does."""

    snapshot: NodeSnapshot
    state: Hashable
    work: frozenset[tuple[str, str]]


class GraphHistory:
    """Follows a graph from pass to pass.

    Args:
        graph: the graph before the first pass.
        earlier: the passes that have made this graph, if it is not an unexpanded one.
    """

    def __init__(self, graph: Readable, earlier: Iterable[str] = ()) -> None:
        self._graph = graph
        self._passes = list(earlier)
        self._seen = {node: _first_look(graph, node) for node in graph.nodes}

    def after(self, pass_name: str) -> tuple[NodeSnapshot, ...]:
        """Note in the metadata of each node if this pass has touched it; returns the nodes as they are now."""
        before, graph = self._seen, self._graph
        nodes = list(graph.nodes)
        gone = set(before).difference(nodes)
        done_by: dict[tuple[str, str], set[str]] = {}
        for node in gone:
            meta = before[node].snapshot.meta
            for work in before[node].work:
                done_by.setdefault(work, set()).update(() if meta is None else meta.passes)
        self._seen = {}
        for node in nodes:
            was = before.get(node)
            meta, attributes = graph.meta(node, was is None, pass_name), graph.attributes(node)
            state = _state(node, attributes, meta)
            unchanged = was is not None and was.state == state
            works = was.work if was is not None and unchanged else graph.work(node)
            if meta is not None and not unchanged:
                touched = meta.passes if was is not None else self._of_work(works, done_by)
                meta = replace(meta, passes=(*touched, pass_name))
                graph.note(node, meta)
            self._seen[node] = _see(graph, node, attributes, meta, state, works, was)
        self._passes.append(pass_name)
        return tuple(seen.snapshot for seen in self._seen.values())

    def _of_work(self, works: frozenset[tuple[str, str]], done_by: dict[tuple[str, str], set[str]]) -> tuple[str, ...]:
        """The passes that touched the nodes that a new node replaces, in the order in which they ran."""
        found = {name for work in works for name in done_by.get(work, ())}
        return tuple(name for name in dict.fromkeys(self._passes) if name in found)


def work_of(kind: str, tables: Sequence[str]) -> frozenset[tuple[str, str]]:
    """The work of a node of this kind on these tables."""
    return frozenset((each, str(name)) for each in NODE_KINDS[kind].once or (kind,) for name in tables)


def _state(node: fx.Node, attributes: str, meta: NodeMeta | None) -> Hashable:
    """What makes a node another one. Names do not, because nodes are renumbered when others have gone."""
    return tuple(node.all_input_nodes), attributes, None if meta is None else replace(meta, passes=())


def _first_look(graph: Readable, node: fx.Node) -> _Seen:
    meta, attributes = graph.meta(node, False, ""), graph.attributes(node)
    return _see(graph, node, attributes, meta, _state(node, attributes, meta), graph.work(node), None)


def _see(
    graph: Readable,
    node: fx.Node,
    attributes: str,
    meta: NodeMeta | None,
    state: Hashable,
    work: frozenset[tuple[str, str]],
    was: _Seen | None,
) -> _Seen:
    inputs = tuple([source.name for source in node.all_input_nodes])
    if was is not None and was.state == state and (was.snapshot.name, was.snapshot.inputs) == (node.name, inputs):
        return _Seen(was.snapshot, state, work)  # shared, because most passes leave most nodes as they are
    return _Seen(NodeSnapshot(node.name, node.op, graph.call(node) + attributes, inputs, meta), state, work)
