"""``collection``: a collection before the first pass: a single leaf."""

from __future__ import annotations

from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recfx.ir.meta import SourceLocation
from recfx.ir.tables import TableSpec
from recfx.nodes.resources import Resources


class UnexpandedCollection(nn.Module):
    """Everything that the passes need to know about a collection.

    Args:
        collection: fully qualified name in the user's model; ``""`` for a root.
        tables: its tables, in order.
        is_weighted: whether the batch's weights multiply the rows.
        resources: the objects that the modules of its nodes will work on.
        source: where the user's code creates it, if known.
    """

    def __init__(
        self,
        collection: str,
        tables: tuple[TableSpec, ...],
        is_weighted: bool,
        resources: Resources,
        source: SourceLocation | None,
    ) -> None:
        super().__init__()
        self.collection = collection
        self.tables = tables
        self.is_weighted = is_weighted
        self.resources = resources
        self.source = source

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Never runs: ``expand_collection`` replaces it."""
        raise RuntimeError("expand_collection has not run")
