"""Follows a graph from pass to pass: what its nodes are, and which passes have made or changed each of them.

Comparing the nodes before and after a pass tells which of them the pass has touched, whatever it did to them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from recfx.ir.meta import NodeMeta
from recfx.ir.node_kinds import NODE_KINDS, Stage
from recfx.ir.node_values import device_of, meta_of_value
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.printer import attributes_text, format_call
from recfx.ir.snapshot import NodeSnapshot

_Work = frozenset[tuple[str, str]]
"""What a node does, by table: a node that does the same takes the place of one that has gone."""


@dataclass(frozen=True)
class _Seen:
    """A node, as the last pass left it."""

    # All that the metadata and the attributes follow from. Names do not count: nodes are renumbered when others go.
    facts: Hashable
    attributes: str
    work: _Work
    snapshot: NodeSnapshot


class GraphHistory:
    """Follows a graph from pass to pass.

    It begins with what earlier passes have made: their names, and the metadata of nodes by name.
    """

    def __init__(self, graph: OperatorGraph, metas: Mapping[str, NodeMeta], passes: Iterable[str]) -> None:
        self._passes = list(passes)
        once = bool(graph.of_kind("dedup_ids"))
        self._seen = {node: _look(graph, node, once, metas.get(node.name)) for node in graph.graph.nodes}

    @property
    def metas(self) -> dict[str, NodeMeta]:
        snapshots = [seen.snapshot for seen in self._seen.values()]
        return {snapshot.name: snapshot.meta for snapshot in snapshots if snapshot.meta is not None}

    def after(self, graph: OperatorGraph, pass_name: str) -> tuple[NodeSnapshot, ...]:
        """Note in the metadata of each node if this pass has touched it; returns the nodes as they are now."""
        before, nodes = self._seen, list(graph.graph.nodes)
        done_by: dict[tuple[str, str], set[str]] = {}
        for node in set(before).difference(nodes):
            meta = before[node].snapshot.meta
            for work in before[node].work:
                done_by.setdefault(work, set()).update(() if meta is None else meta.passes)
        self._seen = {}
        once = bool(graph.of_kind("dedup_ids"))
        for node in nodes:
            was = before.get(node)
            if was is not None and was.facts == _facts(graph, node, once):
                self._seen[node] = _again(graph, node, was)
                continue
            seen = _look(graph, node, once)
            if seen.snapshot.meta is not None:
                earlier = None if was is None else was.snapshot.meta
                passes = self._of_work(seen.work, done_by) if earlier is None else earlier.passes
                made_by = pass_name if earlier is None else earlier.made_by
                meta = replace(seen.snapshot.meta, made_by=made_by, passes=(*passes, pass_name))
                seen = replace(seen, snapshot=replace(seen.snapshot, meta=meta))
            self._seen[node] = seen
        self._passes.append(pass_name)
        return tuple(seen.snapshot for seen in self._seen.values())

    def _of_work(self, works: _Work, done_by: Mapping[tuple[str, str], set[str]]) -> tuple[str, ...]:
        """The passes that touched the nodes that a new node replaces, in the order in which they ran."""
        names = {name for work in works for name in done_by.get(work, ())}
        return tuple(name for name in dict.fromkeys(self._passes) if name in names)


def _facts(graph: OperatorGraph, node: fx.Node, once: bool) -> Hashable:
    """``once``: whether ids are sent once, so that there are fewer until their rows have come back."""
    kind = graph.kind(node)
    fewer = once and bool(kind) and NODE_KINDS[kind].stage not in (Stage.SELECT, Stage.ASSEMBLE)
    # A copy to the host moves the nodes after it there as well.
    device = device_of(graph, node) if kind else ""
    return kind, device, fewer, tuple(node.all_input_nodes), tuple(node.kwargs.items())


def _look(graph: OperatorGraph, node: fx.Node, once: bool, meta: NodeMeta | None = None) -> _Seen:
    kind, attributes, work = graph.kind(node), "", _Work()
    if kind:
        meta, attributes = meta or meta_of_value(graph, node), attributes_text(graph, node)
        tables = [table.table_name for table in graph.tables(node)]
        work = _Work((done, str(table)) for done in NODE_KINDS[kind].once or (kind,) for table in tables)
    inputs = tuple(source.name for source in node.all_input_nodes)
    snapshot = NodeSnapshot(node.name, node.op, format_call(node) + attributes, inputs, meta)
    return _Seen(_facts(graph, node, once), attributes, work, snapshot)


def _again(graph: OperatorGraph, node: fx.Node, was: _Seen) -> _Seen:
    """A node that has not changed; its snapshot is shared unless names have, as passes leave most nodes as they are."""
    inputs = tuple(source.name for source in node.all_input_nodes)
    if (was.snapshot.name, was.snapshot.inputs) == (node.name, inputs):
        return was
    line = format_call(node) + was.attributes
    return replace(was, snapshot=replace(was.snapshot, name=node.name, line=line, inputs=inputs))
