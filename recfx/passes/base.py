"""What a pass is, how passes run one after the other, and what is recorded of each.

The graph is verified before the first one, and after a row of our own or one of a user's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

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


class _Seen(NamedTuple):
    """A node, as the last pass left it.

    Args:
        facts: all that its metadata and attributes follow from, but no names: nodes are renumbered when others go.
        work: what it does, by table: a node that does the same takes the place of one that has gone.
        snapshot: what is recorded of it.
    """

    facts: Hashable
    work: tuple[tuple[str, str], ...]
    snapshot: NodeSnapshot


class _History:
    """Compares the nodes before and after a pass, whatever the pass did to them: which has it made or changed?"""

    def __init__(self, earlier: Rewriting, graph: OperatorGraph) -> None:
        self._passes, once = [record.name for record in earlier.records], bool(graph.of_kind("dedup_ids"))
        self._seen = {node: _look(graph, node, once, earlier.metas.get(node.name)) for node in graph.graph.nodes}

    @property
    def metas(self) -> dict[str, NodeMeta]:
        snapshots = [seen.snapshot for seen in self._seen.values()]
        return {snapshot.name: snapshot.meta for snapshot in snapshots if snapshot.meta is not None}

    def after(self, graph: OperatorGraph, pass_name: str) -> tuple[NodeSnapshot, ...]:
        """Note in the metadata of each node if this pass has touched it; returns the nodes as they are now."""
        before, self._seen, once = self._seen, {}, bool(graph.of_kind("dedup_ids"))
        done_by: dict[tuple[str, str], set[str]] = {}
        for node in before.keys() - set(graph.graph.nodes):
            if (meta := before[node].snapshot.meta) is not None:
                for work in before[node].work:
                    done_by.setdefault(work, set()).update(meta.passes)
        self._passes.append(pass_name)
        for node in graph.graph.nodes:
            was = before.get(node)
            if was is not None and was.facts == _facts(graph, node, once):
                names = (node.name, tuple(source.name for source in node.all_input_nodes))
                if names != (was.snapshot.name, was.snapshot.inputs):  # most nodes stay, and their snapshots are shared
                    was = was._replace(snapshot=_snapshot(graph, node, was.snapshot.meta))
                self._seen[node] = was
                continue
            seen = _look(graph, node, once)
            if (meta := seen.snapshot.meta) is not None:
                earlier = None if was is None else was.snapshot.meta
                names_of_work = {name for work in seen.work for name in done_by.get(work, ())}
                touched = {pass_name, *(names_of_work if earlier is None else earlier.passes)}
                passes = tuple(name for name in dict.fromkeys(self._passes) if name in touched)
                meta = replace(meta, made_by=pass_name if earlier is None else earlier.made_by, passes=passes)
                seen = seen._replace(snapshot=replace(seen.snapshot, meta=meta))
            self._seen[node] = seen
        return tuple(seen.snapshot for seen in self._seen.values())


def _facts(graph: OperatorGraph, node: fx.Node, once: bool) -> Hashable:
    """``once``: whether ids are sent once, so that there are fewer until their rows have come back."""
    kind = graph.kind(node)
    fewer = once and bool(kind) and NODE_KINDS[kind].stage not in (Stage.SELECT, Stage.ASSEMBLE)
    # A copy to the host moves the nodes after it there as well.
    device = device_of(graph, node) if kind else ""
    return kind, device, fewer, tuple(node.all_input_nodes), tuple(node.kwargs.items())


def _look(graph: OperatorGraph, node: fx.Node, once: bool, meta: NodeMeta | None = None) -> _Seen:
    kind, work = graph.kind(node), tuple[tuple[str, str], ...]()
    if kind:
        meta = meta or meta_of_value(graph, node)
        tables = [table.table_name for table in graph.tables(node)]
        work = tuple((done, table) for done in NODE_KINDS[kind].once or (kind,) for table in tables)
    return _Seen(_facts(graph, node, once), work, _snapshot(graph, node, meta))


def _snapshot(graph: OperatorGraph, node: fx.Node, meta: NodeMeta | None) -> NodeSnapshot:
    inputs = tuple(source.name for source in node.all_input_nodes)
    return NodeSnapshot(node.name, node.op, format_call(node) + attributes_text(graph, node), inputs, meta)


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
    history = _History(earlier, graph)
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
