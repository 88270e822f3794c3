"""What a pass is, and how passes run: one after the other, verifying the graph after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from recfx.diagnostics import Diagnostic
from recfx.ir import verify_graph
from recfx.ir.snapshot import GraphHistory, ModuleGraph, PassRecord


@dataclass(frozen=True)
class PassResult:
    """What a pass returns; the names are torch.fx's.

    Args:
        graph_module: the graph, rewritten in place.
        modified: whether it changed.
        declined: what the pass did not rewrite, and why.
    """

    graph_module: fx.GraphModule
    modified: bool
    declined: tuple[Diagnostic, ...] = ()


class Pass(Protocol):
    """A rewrite: a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """``snake_case``, the name of its file."""
        ...

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite ``graph_module`` in place."""
        ...


PASSES_KEY = "recfx_passes"
"""Where a graph module's ``meta`` has the records of the passes that made it."""


def run_passes(
    graph_module: fx.GraphModule,
    pipeline: Iterable[Pass],
    callback: Callable[[str, fx.GraphModule], None] | None = None,
) -> list[PassRecord]:
    """Run ``pipeline`` on a lowered graph, in place; its ``meta["recfx_passes"]`` has the records as well.

    Args:
        graph_module: the graph.
        pipeline: the passes, in order.
        callback: called after each pass with its name and the graph.

    Raises:
        GraphVerificationError: a pass left a malformed graph. The message names the pass and the node.
    """
    records = []
    earlier = graph_module.meta.get(PASSES_KEY, ())
    history = GraphHistory(ModuleGraph(graph_module), [record.name for record in earlier])
    for rewrite in pipeline:
        started = time.perf_counter()
        result = rewrite.call(graph_module)
        verify_graph(graph_module, after=rewrite.name)
        seconds = time.perf_counter() - started
        nodes = history.after(rewrite.name)
        records.append(PassRecord(rewrite.name, result.modified, nodes, result.declined, seconds))
        if callback is not None:
            graph_module.recompile()
            callback(rewrite.name, graph_module)
    graph_module.recompile()  # once at the end, because nothing calls the graph in between
    graph_module.meta[PASSES_KEY] = (*earlier, *records)
    return records
