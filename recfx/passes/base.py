"""What a pass is, and how passes run, one after the other: the graph is verified before, and after a row of our own."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import fx

from recfx.errors import Diagnostic
from recfx.ir.meta import Frozen, NodeMeta
from recfx.ir.node_kinds import NODE_KINDS, Stage
from recfx.ir.node_values import device_of, meta_of_value
from recfx.ir.operator_graph import OperatorGraph, names_in
from recfx.ir.printer import attributes_text, format_call
from recfx.ir.verifier import GraphVerificationError, verify_graph


@dataclass(frozen=True)
class NodeSnapshot(Frozen):
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


@dataclass(frozen=True)
class PassRecord(Frozen):
    """What a pass did, for the report and for drawings.

    Args:
        name: the name of the pass.
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


BEFORE = "before"
"""The name of the step before the first pass; every other step has the name of its pass."""

PASSES_KEY = "recfx_passes"
"""Where a graph module's ``meta`` has the records of the passes that made it."""


@dataclass(frozen=True)
class Rewriting(Frozen):
    """What passes have made of a graph."""

    graph: OperatorGraph
    records: tuple[PassRecord, ...]
    metas: Mapping[str, NodeMeta]


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


@dataclass(frozen=True)
class PassResult:
    """What a pass gives back; the name is torch.fx's.

    Args:
        graph: the graph, rewritten.
        declined: what was not rewritten, and why; a diagnostic whose ``by`` is empty is the pass's own.
    """

    graph: OperatorGraph
    declined: tuple[Diagnostic, ...] = ()


class Pass(Protocol):
    """What runs as a pass: a ``Rewrite``, or an object of a user's class."""

    @property
    def name(self) -> str:
        """``snake_case``; reports and drawings show it."""
        ...

    def call(self, graph: OperatorGraph) -> PassResult:
        """Rewrite a graph, which is the pass's own to edit. What it does must follow from the graph alone."""
        ...


@dataclass(frozen=True)
class Rewrite:
    """A function as a pass, by the name of its file; the graph that it rewrites is its own to edit."""

    name: str
    call: Callable[[OperatorGraph], PassResult] = field(repr=False)


def run_passes(
    graph: OperatorGraph | Rewriting,
    passes: Iterable[Pass],
    callback: Callable[[str, OperatorGraph], None] | None = None,
) -> Rewriting:
    """Run ``passes`` in order, on a copy: ``graph`` stays as it is.

    Args:
        graph: the graph; or what earlier passes have made, whose records come first then.
        passes: the passes.
        callback: called after each of them with its name and the graph.

    Raises:
        GraphVerificationError: a pass left a malformed graph, or something else. The message names the pass and the
            node.
    """
    earlier = graph if isinstance(graph, Rewriting) else Rewriting(graph, (), {})
    if not earlier.records:
        verify_graph(earlier.graph, after=BEFORE)
    passes = list(passes)
    graph = earlier.graph.copy()
    history = GraphHistory(graph, earlier.metas, [record.name for record in earlier.records])
    records = list(earlier.records)
    for pass_, following in zip(passes, [*passes, None][1:], strict=True):
        started, context = time.perf_counter(), graph.context
        result = pass_.call(graph)
        if not (isinstance(result, PassResult) and isinstance(result.graph, OperatorGraph)):
            raise GraphVerificationError(f"after pass {pass_.name}: it returned {result!r}, no PassResult")
        if result.graph.context != context:
            raise GraphVerificationError(f"after pass {pass_.name}: it changed the context of the graph")
        graph = result.graph
        graph.renumber()
        if not (_is_own(pass_) and _is_own(following)):
            verify_graph(graph, after=pass_.name)
        seconds = time.perf_counter() - started
        nodes = history.after(graph, pass_.name)
        declined = tuple(replace(why, by=why.by or pass_.name) for why in result.declined)
        modified = not records or nodes != records[-1].nodes
        records.append(PassRecord(pass_.name, modified, nodes, declined, seconds))
        if callback is not None:
            callback(pass_.name, graph)
    return Rewriting(graph, tuple(records), history.metas)


def _is_own(pass_: Pass | None) -> bool:
    """Whether it is one of recfx's passes, after the last of which in a row the graph is verified."""
    return isinstance(pass_, Rewrite) and pass_.call.__module__.startswith("recfx.passes.")


def restore_means(graph: OperatorGraph) -> None:
    """Let lookups whose means are divided afterwards, and no longer need to be, pool means themselves.

    Pooled rows that have arrived from several ranks must stay sums.
    """
    still_hashed = {name for node in graph.of_kind("hash_ids") for name in names_in(node, "hashed")}
    restored: dict[fx.Node, fx.Node] = {}
    for node in graph.of_kind("mean_divide"):
        pooled, divided = node.all_input_nodes[0], names_in(node, "divided")
        if graph.kind(pooled) != "lookup" or still_hashed.intersection(divided):
            continue
        if all(table.name in divided for table in graph.tables(pooled)):
            graph.change(pooled, combine="MEAN")
            restored[node] = pooled
    graph.replace_all(restored)
    for node in restored:
        graph.graph.erase_node(node)
