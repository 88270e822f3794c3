"""What a graph was like after a pass: later passes rewrite the graph in place, and its snapshots stay.

Comparing the nodes before and after a pass also tells which nodes the pass has touched, whatever it did to them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx

from recfx.ir.meta import NodeMeta, annotate, node_meta
from recfx.ir.node_kinds import NODE_KINDS
from recfx.ir.printer import format_attributes, format_call
from recfx.ir.typed_access import find_module


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
class _Seen:
    """A node before a pass: what the pass may change of it, and the work that it does."""

    snapshot: NodeSnapshot
    state: Hashable
    work: frozenset[tuple[str, str]]


class GraphHistory:
    """Follows a graph from pass to pass.

    Args:
        graph_module: the graph before the first pass.
        earlier: the passes that have made this graph, if it is not an unexpanded one.
    """

    def __init__(self, graph_module: fx.GraphModule, earlier: Iterable[str] = ()) -> None:
        self._graph_module = graph_module
        self._passes = list(earlier)
        self._seen = {node: _first_look(graph_module, node) for node in graph_module.graph.nodes}

    def after(self, pass_name: str) -> tuple[NodeSnapshot, ...]:
        """Note in the metadata of each node if this pass has touched it; returns the nodes as they are now."""
        before = self._seen
        nodes = list(self._graph_module.graph.nodes)
        gone = set(before).difference(nodes)
        done_by: dict[tuple[str, str], set[str]] = {}
        for node in gone:
            meta = before[node].snapshot.meta
            for work in before[node].work:
                done_by.setdefault(work, set()).update(() if meta is None else meta.passes)
        self._seen = {}
        for node in nodes:
            was, meta, now = before.get(node), node_meta(node), _look(self._graph_module, node)
            works = was.work if was is not None and was.state == now.state else _work(self._graph_module, node)
            if meta is not None and (was is None or was.state != now.state):
                touched = meta.passes if was is not None else self._of_work(works, done_by)
                annotate(node, replace(meta, passes=(*touched, pass_name)))
            self._seen[node] = _see(node, now, works, was)
        self._passes.append(pass_name)
        return tuple(seen.snapshot for seen in self._seen.values())

    def _of_work(self, works: frozenset[tuple[str, str]], done_by: dict[tuple[str, str], set[str]]) -> tuple[str, ...]:
        """The passes that touched the nodes that a new node replaces, in the order in which they ran."""
        found = {name for work in works for name in done_by.get(work, ())}
        return tuple(name for name in dict.fromkeys(self._passes) if name in found)


def snapshot(graph_module: fx.GraphModule) -> tuple[NodeSnapshot, ...]:
    """The nodes of a graph as they are now."""
    return tuple(_first_look(graph_module, node).snapshot for node in graph_module.graph.nodes)


class _Look(NamedTuple):
    """What is read of a node once per pass.

    Args:
        attributes: those of its module that are printed.
        state: what makes the node another one. Names do not, because nodes are renumbered when others have gone.
    """

    attributes: str
    state: Hashable


def _look(graph_module: fx.GraphModule, node: fx.Node) -> _Look:
    meta, attributes = node_meta(node), format_attributes(graph_module, node)
    known = None if meta is None else replace(meta, passes=())
    return _Look(attributes, (tuple(node.all_input_nodes), attributes, known))


def _first_look(graph_module: fx.GraphModule, node: fx.Node) -> _Seen:
    return _see(node, _look(graph_module, node), _work(graph_module, node), None)


def _see(node: fx.Node, look: _Look, work: frozenset[tuple[str, str]], was: _Seen | None) -> _Seen:
    inputs = tuple(source.name for source in node.all_input_nodes)
    now = NodeSnapshot(node.name, node.op, format_call(node) + look.attributes, inputs, node_meta(node))
    if was is not None and was.snapshot == now:
        now = was.snapshot  # shared, because most passes leave most nodes as they are
    return _Seen(now, look.state, work)


def _work(graph_module: fx.GraphModule, node: fx.Node) -> frozenset[tuple[str, str]]:
    """What the node does, by table: a node that does the same takes the place of one that has gone."""
    meta = node_meta(node)
    if meta is None:
        return frozenset()
    done = NODE_KINDS[meta.kind].once or (meta.kind,)
    specs = getattr(find_module(graph_module, node), "tables", None)  # a shard does the work of its table
    names = meta.tables if specs is None else tuple(getattr(table, "table_name", table) for table in specs)
    return frozenset((each, str(name)) for each in done for name in names)
