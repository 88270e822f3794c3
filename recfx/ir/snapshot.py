"""What a graph was like after a pass: later passes rewrite the graph in place, and its snapshots stay.

``recfx.passes.history`` makes the snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recfx.errors import Diagnostic
from recfx.ir.meta import Frozen, NodeMeta
from recfx.ir.operator_graph import OperatorGraph


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
