"""Rows that were looked for ahead: in an index's own time nothing but its new ids is left to do.

Finding reads only. What is found stays right whatever is inserted meanwhile; ids that were absent are inserted in turn.
So nothing that anybody can see happens ahead of a batch's step. Ids that are counted one by one (admission, scores of
eviction), and rows that may be evicted, are left to their step as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.hashing import HashIndex
from recfx.kernels import library
from recfx.nodes.segments import find_rows

if TYPE_CHECKING:
    from recfx.nodes.hash_ids import HashIds

_ATTRIBUTE = "rows_found_ahead"


class FoundRows:
    """Rows of one batch.

    Args:
        ids: int64, on the CPU.
        rows: of the ids, -1 where an index holds none.
        indexes: that were asked.
        stamps: their states then.
    """

    def __init__(
        self, ids: torch.Tensor, rows: torch.Tensor, indexes: list[HashIndex], stamps: list[tuple[Any, ...]]
    ) -> None:
        self.ids, self.rows = ids, rows
        self._indexes, self._stamps = indexes, stamps

    @property
    def are_right(self) -> bool:
        """No id has lost its row since, and nobody has loaded another state."""
        return [_stamp(index) for index in self._indexes] == self._stamps


def finder(hash_ids: HashIds) -> Callable[[KeyedJaggedTensor], None] | None:
    """What finds the rows of a batch, on any thread, and hangs them on it; None where that cannot be done ahead.

    To be called on the thread that owns the indexes.
    """
    if hash_ids.counts_every_id or not hash_ids.training or not library.load():
        return None  # the references of the operators are for one thread
    indexes = {name: hash_ids.index(name) for name in hash_ids.hashed}
    if any(index.slots.is_meta for index in indexes.values()):
        return None
    buffers = {name: index.index_buffers() for name, index in indexes.items()}
    stamps = [_stamp(index) for index in indexes.values()]

    def find(features: KeyedJaggedTensor) -> None:
        segments = hash_ids.segments(features)
        ids = features.values().to("cpu", torch.int64)
        mine = [buffers[segment.table.name] for segment in segments]
        policies = [indexes[segment.table.name].policy for segment in segments]
        rows, _ = find_rows(ids, segments, mine, policies)
        setattr(features, _ATTRIBUTE, FoundRows(ids, rows, list(indexes.values()), stamps))

    return find


def found_rows(features: KeyedJaggedTensor) -> FoundRows | None:
    """What was found ahead for this batch, if it is still right."""
    found: FoundRows | None = getattr(features, _ATTRIBUTE, None)
    return found if found is not None and found.are_right else None


def _stamp(index: HashIndex) -> tuple[Any, ...]:
    # Operators that insert do not change these; erasing, loading, and moving do.
    buffers = index._buffers
    row_ids, row_state = buffers["row_ids"], buffers["row_state"]
    assert row_ids is not None
    assert row_state is not None
    return index.removals, id(row_ids), row_ids._version, row_state._version
