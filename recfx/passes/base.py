"""What a pass is, and how passes run: one after the other, verifying the graph after each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from recfx.diagnostics import Diagnostic
from recfx.ir import format_graph, verify_graph


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


@dataclass(frozen=True)
class PassRecord:
    """What a pass did, for the report: its name, whether it changed the graph, the new graph, and what it declined."""

    name: str
    modified: bool
    text: str
    declined: tuple[Diagnostic, ...]


def run_passes(
    graph_module: fx.GraphModule,
    pipeline: Iterable[Pass],
    callback: Callable[[str, fx.GraphModule], None] | None = None,
) -> list[PassRecord]:
    """Run ``pipeline`` on ``graph_module``, in place.

    Args:
        graph_module: a collection that has not been expanded yet: placeholder, one call, output.
        pipeline: the passes, in order.
        callback: called after each pass with its name and the graph.

    Raises:
        GraphVerificationError: a pass left a malformed graph. The message names the pass and the node.
    """
    records = []
    for rewrite in pipeline:
        result = rewrite.call(graph_module)
        verify_graph(graph_module, after=rewrite.name)
        records.append(PassRecord(rewrite.name, result.modified, format_graph(graph_module), result.declined))
        if callback is not None:
            graph_module.recompile()
            callback(rewrite.name, graph_module)
    graph_module.recompile()  # once at the end, because nothing calls the graph in between
    return records
