"""What a rewrite is, and how rewrites run: one after the other, verifying the graph before and after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from recfx.diagnostics import Diagnostic
from recfx.ir.meta import NodeMeta
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.snapshot import GraphHistory, PassRecord
from recfx.ir.verify_operators import verify_operators
from recfx.rewrites.read_operators import ReadOperators

BEFORE = "before"
"""The name of the step before the first rewrite; every other step has the name of its rewrite."""


@dataclass(frozen=True)
class Rewritten:
    """What a rewrite gives back.

    Args:
        graph: the graph, rewritten.
        declined: what was not rewritten, and why.
    """

    graph: OperatorGraph
    declined: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True)
class Rewrite:
    """One pass.

    Args:
        name: ``snake_case``, the name of its file.
        call: rewrites a graph, which is its own to edit.
    """

    name: str
    call: Callable[[OperatorGraph], Rewritten]


@dataclass(frozen=True)
class Rewriting:
    """What rewrites have made.

    Args:
        graph: the graph after the last one.
        records: what each of them did.
        metas: the metadata of the graph's nodes.
    """

    graph: OperatorGraph
    records: tuple[PassRecord, ...]
    metas: dict[fx.Node, NodeMeta]


def run_rewrites(
    graph: OperatorGraph,
    rewrites: Iterable[Rewrite],
    callback: Callable[[str, OperatorGraph], None] | None = None,
) -> Rewriting:
    """Run ``rewrites`` in order, on a copy: ``graph`` stays as it is.

    Args:
        graph: the graph.
        rewrites: the rewrites.
        callback: called after each of them with its name and the graph.

    Raises:
        GraphVerificationError: a rewrite left a malformed graph. The message names the rewrite and the node.
    """
    verify_operators(graph, after=BEFORE)
    graph = graph.copy()
    reader = ReadOperators(graph)
    history = GraphHistory(reader)
    records: list[PassRecord] = []
    for rewrite in rewrites:
        started = time.perf_counter()
        result = rewrite.call(graph)
        graph = reader.graph = result.graph
        graph.renumber()
        verify_operators(graph, after=rewrite.name)
        seconds = time.perf_counter() - started
        nodes = history.after(rewrite.name)
        modified = not records or nodes != records[-1].nodes
        records.append(PassRecord(rewrite.name, modified, nodes, result.declined, seconds))
        if callback is not None:
            callback(rewrite.name, graph)
    return Rewriting(graph, tuple(records), {node: reader.metas[node] for node in graph.operators})
