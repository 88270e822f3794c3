"""What a pass is, and how passes run, one after the other: the graph is verified before, and after a row of our own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import fx

from recfx.errors import Diagnostic
from recfx.ir.operator_graph import OperatorGraph, names_in
from recfx.ir.snapshot import BEFORE, PassRecord, Rewriting
from recfx.ir.verifier import GraphVerificationError, verify_graph
from recfx.passes.history import GraphHistory


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
