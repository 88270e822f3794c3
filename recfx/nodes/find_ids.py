"""``find_ids``: the rows that a batch's ids have already. It only reads, so it may run ahead of the batch's step.

What is found stays right whatever is inserted meanwhile; ``insert_ids`` does the rest in turn. So nothing that anybody
can see happens ahead of a batch's step.
"""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.nodes.base import NodeModule
from recfx.nodes.hash_ids import HashIds
from recfx.nodes.segments import find_rows
from recfx.nodes.snapshot_indexes import IndexSnapshot


class FoundRows:
    """Rows of one batch.

    Args:
        ids: int64 ``[n]``, on the indexes' device.
        rows: int64 ``[n]``, -1 where an index holds none.
        snapshot: of the indexes that were asked.
    """

    def __init__(self, ids: torch.Tensor, rows: torch.Tensor, snapshot: IndexSnapshot) -> None:
        self.ids, self.rows = ids, rows
        self._snapshot = snapshot

    @property
    def are_right(self) -> bool:
        """No id has lost its row since, and nobody has loaded another state."""
        return self._snapshot.holds


class FindIds(NodeModule):
    """Find rows, on any thread.

    Args:
        hash_ids: the node that this one is a part of.
    """

    def __init__(self, hash_ids: HashIds) -> None:
        super().__init__()
        self.hash_ids = hash_ids

    @property
    def hashed(self) -> tuple[str, ...]:
        """Names of the tables whose ids go through an index."""
        return self.hash_ids.hashed

    def forward(self, features: KeyedJaggedTensor, snapshot: IndexSnapshot | None) -> FoundRows | None:
        """``features``: raw ids, keys in the collection's order. None on meta."""
        if snapshot is None or features.values().is_meta:
            return None
        segments = self.hash_ids.indexes.segments(features)
        ids = features.values().to(self.hash_ids.indexes.device, torch.int64)
        names = [segment.table.name for segment in segments]
        policies = [snapshot.indexes[name].policy for name in names]
        operators = self.hash_ids.indexes.operators
        rows, _ = find_rows(operators, ids, segments, [snapshot.buffers[name] for name in names], policies)
        return FoundRows(ids, rows, snapshot)
