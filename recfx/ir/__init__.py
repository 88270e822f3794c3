"""The graph: node kinds, node metadata, verifier and printer. Nothing here depends on devices."""

from recfx.ir.meta import Collective, NodeMeta, SourceLocation, annotate
from recfx.ir.node_kinds import NODE_KINDS, Input, NodeKind, Stage, ValueType
from recfx.ir.printer import format_graph
from recfx.ir.tables import TableSpec
from recfx.ir.verifier import GraphVerificationError, verify_graph

__all__ = [
    "NODE_KINDS",
    "Collective",
    "GraphVerificationError",
    "Input",
    "NodeKind",
    "NodeMeta",
    "SourceLocation",
    "Stage",
    "TableSpec",
    "ValueType",
    "annotate",
    "format_graph",
    "verify_graph",
]


def __dir__() -> list[str]:
    return __all__
