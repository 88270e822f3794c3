"""``snapshot_indexes``: takes a snapshot of the current indexes, for finding rows on another thread."""

from __future__ import annotations

from typing import Any

from recfx.hashing import HashIndex
from recfx.kernels.index_buffers import IndexBuffers
from recfx.runtime.base import NodeModule
from recfx.runtime.hash_ids import HashIds


class IndexSnapshot:
    """Views of the indexes' tensors, and the state that they were in.

    Later insertions are visible in the views but do not change any row that was found; erasing, evicting and loading
    do.

    Args:
        indexes: the indexes by table name.
    """

    def __init__(self, indexes: dict[str, HashIndex]) -> None:
        self.indexes = indexes
        self.buffers: dict[str, IndexBuffers] = {name: index.index_buffers() for name, index in indexes.items()}
        self._stamps = [_stamp(index) for index in indexes.values()]

    @property
    def holds(self) -> bool:
        """Whether the snapshot still holds: no id has lost its row since, and no other state has been loaded."""
        return [_stamp(index) for index in self.indexes.values()] == self._stamps


class SnapshotIndexes(NodeModule):
    """Take a snapshot, on the thread that owns the indexes.

    Args:
        hash_ids: the node whose indexes and mode this node uses.
    """

    def __init__(self, hash_ids: HashIds) -> None:
        super().__init__()
        self.hash_ids = hash_ids

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
        if indexes.counts_every_id or not self.hash_ids.training or not indexes.operators.FINDS_ON_ANY_THREAD:
            return False
        return not any(indexes.index(name).slot_groups.is_meta for name in indexes.hashed)


def _stamp(index: HashIndex) -> tuple[Any, ...]:
    # Inserting does not change these; erasing, loading, moving and undoing an insertion do.
    buffers = index._buffers
    row_ids, row_state = buffers["row_ids"], buffers["row_state"]
    assert row_ids is not None
    assert row_state is not None
    return index.state_number, index.removals, id(row_ids), row_ids._version, row_state._version
