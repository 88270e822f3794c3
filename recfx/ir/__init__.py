"""The graph: node vocabulary, node metadata, verifier and printer. Knows nothing of devices."""

from recfx.ir.meta import Collective, NodeMeta, SourceLocation, annotate
from recfx.ir.printer import format_graph
from recfx.ir.tables import TableSpec
from recfx.ir.verifier import GraphVerificationError, verify_graph
from recfx.ir.vocabulary import VOCABULARY, NodeKind

__all__ = [
    "VOCABULARY",
    "Collective",
    "GraphVerificationError",
    "NodeKind",
    "NodeMeta",
    "SourceLocation",
    "TableSpec",
    "annotate",
    "format_graph",
    "verify_graph",
]
