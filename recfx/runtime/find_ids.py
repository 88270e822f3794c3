"""``find_ids``: finds the rows that a batch's ids already have. It only reads, so it may run before the batch's step.

Insertions in the meantime do not make the result wrong; ``insert_ids`` does the rest in batch order. So nothing with a
visible effect happens before a batch's step.
"""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.runtime.base import NodeModule
from recfx.runtime.hash_ids import HashIds
from recfx.runtime.segments import find_rows
from recfx.runtime.snapshot_indexes import IndexSnapshot


class FoundRows:
    """The rows found for one batch.

    Args:
        ids: int64 ``[n]``, on the indexes' device.
        rows: int64 ``[n]``, -1 if the index does not hold the id.
        snapshot: the snapshot of the indexes in which they were found.
    """

    def __init__(self, ids: torch.Tensor, rows: torch.Tensor, snapshot: IndexSnapshot) -> None:
        self.ids, self.rows = ids, rows
        self._snapshot = snapshot

    @property
    def are_right(self) -> bool:
        """Whether the rows are still right: no id has lost its row since, and no other state has been loaded."""
        return self._snapshot.holds


class FindIds(NodeModule):
    """Find rows, on any thread.

    Args:
        hash_ids: the node that this node is a part of.
    """

    def __init__(self, hash_ids: HashIds) -> None:
        super().__init__()
        self.hash_ids = hash_ids

    def forward(self, features: KeyedJaggedTensor, snapshot: IndexSnapshot | None) -> FoundRows | None:
        """``features``: raw ids, with keys in the collection's order. Returns None on meta."""
        if snapshot is None or features.values().is_meta:
            return None
        segments = self.hash_ids.indexes.segments(features)
        ids = features.values().to(self.hash_ids.indexes.device, torch.int64)
        names = [segment.table.name for segment in segments]
        policies = [snapshot.indexes[name].policy for name in names]
        operators = self.hash_ids.indexes.operators
        rows, _ = find_rows(operators, ids, segments, [snapshot.buffers[name] for name in names], policies)
        return FoundRows(ids, rows, snapshot)
