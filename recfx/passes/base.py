"""What a pass is, how passes run one after the other, and what is recorded of each.

The graph is verified before the first one, and after a row of our own or one of a user's.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from torch import fx

from recfx.errors import Diagnostic
from recfx.ir.meta import Frozen, NodeMeta
from recfx.ir.node_kinds import NODE_KINDS, Stage
from recfx.ir.node_values import device_of, meta_of_value
from recfx.ir.operator_graph import OperatorGraph, names_in
from recfx.ir.printer import format_graph
from recfx.ir.verifier import GraphVerificationError, verify_graph


@dataclass(frozen=True)
class PassRecord(Frozen):
    """What a pass did, for the report and for drawings."""

    name: str  # the name of the pass
    modified: bool  # whether it changed the graph
    graph: OperatorGraph  # the graph after the pass
    metas: Mapping[str, NodeMeta]  # the metadata of its operators, by name
    declined: tuple[Diagnostic, ...]  # what it did not rewrite, and why

    @property
    def text(self) -> str:
        """The graph after the pass, as ``format_graph`` prints it."""
        return format_graph(self.graph)


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
    """A node, as the last pass left it."""

    # All that its metadata and attributes follow from, but no names: nodes are renumbered when others go
    facts: Hashable
    # What it does, by table: a node that does the same takes the place of one that has gone
    work: tuple[tuple[str, str], ...]
    meta: NodeMeta | None  # its metadata; None for a node that is no operator


_Graph = dict[fx.Node, _Seen]


def _look(graph: OperatorGraph, metas: Mapping[str, NodeMeta], before: _Graph, passes: list[str]) -> _Graph:
    """The nodes as they are now. The last of the ``passes`` has touched each that differs from what it was ``before``.

    ``metas``: what earlier runs have noted of nodes, by name, that were not looked at yet.
    """
    has_dedup = bool(graph.of_kind("dedup_ids"))
    done_by: dict[tuple[str, str], set[str]] = {}
    for node in before.keys() - set(graph.graph.nodes):
        if (meta := before[node].meta) is not None:
            for work in before[node].work:
                done_by.setdefault(work, set()).update(meta.passes)
    now: _Graph = {}
    for node in graph.graph.nodes:
        was, facts, kind = before.get(node), _facts(graph, node, has_dedup), graph.kind(node)
        if was is not None and was.facts == facts:
            now[node] = was
            continue
        if not kind:
            now[node] = _Seen(facts, (), None)
            continue
        tables = [table.table_name for table in graph.tables(node)]
        does = tuple((done, table) for done in NODE_KINDS[kind].once or (kind,) for table in tables)
        earlier, meta = None if was is None else was.meta, metas.get(node.name) or meta_of_value(graph, node)
        if passes:
            of_gone = {name for work in does for name in done_by.get(work, ())}
            touched = {passes[-1], *(of_gone if earlier is None else earlier.passes)}
            made_by = passes[-1] if earlier is None else earlier.made_by
            in_order = tuple(name for name in dict.fromkeys(passes) if name in touched)
            meta = replace(meta, made_by=made_by, passes=in_order)
        now[node] = _Seen(facts, does, meta)
    return now


def _metas(seen: _Graph) -> dict[str, NodeMeta]:
    return {node.name: one.meta for node, one in seen.items() if one.meta is not None}


def _facts(graph: OperatorGraph, node: fx.Node, has_dedup: bool) -> Hashable:
    kind = graph.kind(node)
    # There are fewer ids until their rows have come back. A copy to the host moves the nodes after it there as well.
    fewer = has_dedup and bool(kind) and NODE_KINDS[kind].stage not in (Stage.SELECT, Stage.ASSEMBLE)
    device = device_of(graph, node) if kind else ""
    return kind, device, fewer, tuple(node.all_input_nodes), tuple(node.kwargs.items())


@dataclass(frozen=True)
class PassResult:
    """What a pass gives back; the name is torch.fx's."""

    graph: OperatorGraph  # the graph, rewritten
    # What was not rewritten, and why; a diagnostic whose ``by`` is empty is the pass's own
    declined: tuple[Diagnostic, ...] = ()


class Pass(Protocol):
    """What runs as a pass: a ``Rewrite``, or an object of a user's class."""

    @property
    def name(self) -> str:
        """``snake_case``; reports and drawings show it."""

    def call(self, graph: OperatorGraph) -> PassResult:
        """Rewrite a graph, which is the pass's own to edit. What it does must follow from the graph alone."""


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
    records = list(earlier.records)
    names = [record.name for record in records]
    seen = _look(graph, earlier.metas, {}, [])
    for pass_, following in zip(passes, [*passes, None][1:], strict=True):
        context = graph.context
        result = pass_.call(graph)
        if not (isinstance(result, PassResult) and isinstance(result.graph, OperatorGraph)):
            raise GraphVerificationError(f"after pass {pass_.name}: it returned {result!r}, no PassResult")
        if result.graph.context != context:
            raise GraphVerificationError(f"after pass {pass_.name}: it changed the context of the graph")
        graph = result.graph
        graph.renumber()
        if not (_is_own(pass_) and _is_own(following)):
            verify_graph(graph, after=pass_.name)
        names.append(pass_.name)
        seen = _look(graph, {}, seen, names)
        declined = tuple(replace(why, by=why.by or pass_.name) for why in result.declined)
        metas = _metas(seen)
        modified = not records or metas != records[-1].metas or graph != records[-1].graph
        after = graph.copy() if modified else records[-1].graph
        records.append(PassRecord(pass_.name, modified, after, metas, declined))
        if callback is not None:
            callback(pass_.name, graph)
    return Rewriting(graph, tuple(records), _metas(seen))


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
