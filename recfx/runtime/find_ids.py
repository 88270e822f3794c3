"""``snapshot_indexes``, ``find_ids`` and ``insert_ids``: hashing in steps; a pipeline runs the first two ahead.

Finding the rows that ids already have only reads, so it may run before the batch's step, on another thread. Insertions
in the meantime do not make the result wrong; ``insert_ids`` does the rest in batch order. Nothing with a visible effect
happens before a batch's step.
"""

from __future__ import annotations

from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.hashing import HashIndex
from recfx.kernels.index.hash_index import finds_on_any_thread
from recfx.kernels.index.index_buffers import IndexBuffers
from recfx.runtime.bags import with_values
from recfx.runtime.base import NodeModule
from recfx.runtime.hash_ids import HashIds, hash_batch
from recfx.runtime.training_checks import is_replay


class IndexSnapshot:
    """Views of the indexes' tensors, and the state that they were in.

    Later insertions are visible in the views but do not change any row that was found; erasing, evicting and loading
    do.
    """

    def __init__(self, indexes: dict[str, HashIndex]) -> None:
        self.indexes = indexes
        self.buffers: dict[str, IndexBuffers] = {name: index.index_buffers() for name, index in indexes.items()}
        self._stamps = [_stamp(index) for index in indexes.values()]

    @property
    def holds(self) -> bool:
        """Whether the snapshot still holds: no id has lost its row since, and no other state has been loaded."""
        return [_stamp(index) for index in self.indexes.values()] == self._stamps


class _StepOfHashing(NodeModule):
    def __init__(self, hash_ids: HashIds) -> None:
        super().__init__()
        self.hash_ids = hash_ids


class SnapshotIndexes(_StepOfHashing):
    """Take a snapshot, on the thread that owns the indexes."""

    def forward(self) -> IndexSnapshot | None:
        """Returns None on meta."""
        indexes = self.hash_ids.indexes
        return None if indexes.on_meta else IndexSnapshot({name: indexes.index(name) for name in indexes.hashed})

    @property
    def is_of_use(self) -> bool:
        """Whether rows may be found now, on any thread, for a batch that is hashed later.

        They may not in eval mode, which counts what it answers, or if every id is counted, or if ids may lose their
        rows.
        """
        indexes = self.hash_ids.indexes
        if indexes.counts_every_id or not self.hash_ids.training or not finds_on_any_thread():
            return False
        return not any(indexes.index(name).slot_groups.is_meta for name in indexes.hashed)


def _stamp(index: HashIndex) -> tuple[Any, ...]:
    # Inserting does not change these; erasing, loading and moving do.
    buffers = index._buffers
    row_ids, row_state = buffers["row_ids"], buffers["row_state"]
    assert row_ids is not None
    assert row_state is not None
    return index.state_number, index.removals, id(row_ids), row_ids._version, row_state._version


class FoundRows:
    """The rows found for one batch in a snapshot of the indexes.

    ``ids`` and ``rows`` are int64 ``[n]``, on the indexes' device; -1 stands for an id that the index does not hold.
    """

    def __init__(self, ids: torch.Tensor, rows: torch.Tensor, snapshot: IndexSnapshot) -> None:
        self.ids, self.rows, self.snapshot = ids, rows, snapshot


class FindIds(_StepOfHashing):
    """Find rows, on any thread."""

    def forward(self, features: KeyedJaggedTensor, snapshot: IndexSnapshot | None) -> FoundRows | None:
        """``features``: raw ids, with keys in the collection's order. Returns None on meta."""
        if snapshot is None or features.values().is_meta:
            return None
        segments = self.hash_ids.indexes.segments(features)
        ids = features.values().to(self.hash_ids.indexes.device, torch.int64)
        names = [segment.table.name for segment in segments]
        policies = [snapshot.indexes[name].policy for name in names]
        buffers = [snapshot.buffers[name] for name in names]
        rows, _ = self.hash_ids.indexes.find_in(buffers, policies, ids, segments)
        return FoundRows(ids, rows, snapshot)


class InsertIds(_StepOfHashing):
    """Insert the ids that have no row, in the mode of ``hash_ids``.

    None of the tables evicts or admits ids: ``split_hash_ids`` leaves those whole.
    """

    def forward(self, features: KeyedJaggedTensor, found_rows: FoundRows | None) -> KeyedJaggedTensor:
        """Return and do what ``hash_ids`` would for ``features``.

        ``found_rows`` is not used if its rows are no longer right, in eval mode, and in a forward that activation
        checkpointing runs again.

        Raises:
            The errors of ``HashIds.forward``.
        """
        indexes, training = self.hash_ids.indexes, self.hash_ids.training
        if not indexes.begin(features, training):
            return features
        if found_rows is not None and training and not is_replay() and found_rows.snapshot.holds:
            return self.insert_absent(features, found_rows)
        return hash_batch(indexes, features, training)[0]

    def insert_absent(self, features: KeyedJaggedTensor, found_rows: FoundRows) -> KeyedJaggedTensor:
        """The rows in ``found_rows``, completed for the ids that have none."""
        indexes, rows = self.hash_ids.indexes, found_rows.rows
        if bool((rows == -1).any()):
            indexes.insert_absent(features, found_rows.ids, rows)
        else:
            indexes.count_resident(indexes.segments(features))
        return with_values(features, rows.to(features.values().device), features.weights_or_none())
