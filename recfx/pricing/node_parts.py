"""What the modules of nodes work on: their tables, and the store that has these tables' tensors."""

from __future__ import annotations

from torch import nn

from recfx.ir.tables import TableSpec
from recfx.nodes import (
    FindIds,
    FindRows,
    HashIds,
    HashLookup,
    InsertIds,
    Lookup,
    MeanDivide,
    SelectFeatures,
    SnapshotIndexes,
    TableStore,
)


def tables_of(module: nn.Module | None) -> tuple[TableSpec, ...]:
    """The tables, or the shards of tables, that a node's module works on; empty if it does not know them."""
    if isinstance(module, HashLookup):
        return module.lookup.tables
    if isinstance(module, (FindIds, FindRows, InsertIds, SnapshotIndexes)):
        return module.hash_ids.tables
    if isinstance(module, (HashIds, Lookup, MeanDivide, SelectFeatures)):
        return module.tables
    return ()


def store_of(module: nn.Module | None) -> TableStore | None:
    """The store that a node's module reads; None if it reads none."""
    if isinstance(module, HashLookup):
        return module.lookup.store
    if isinstance(module, (FindIds, FindRows, InsertIds, SnapshotIndexes)):
        return module.hash_ids.indexes.store
    if isinstance(module, HashIds):
        return module.indexes.store
    if isinstance(module, Lookup):
        return module.store
    return None
