"""What one batch changed in the tables of a collection when its ids were inserted, and how it is taken back."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from recfx.hashing import HashIndex
from recfx.kernels.hash_index import UndoRecord
from recfx.kernels.host import HashIndexOperators
from recfx.kernels.index_buffers import BATCHES
from recfx.runtime.segments import Segment
from recfx.runtime.table_store import TableStore


class _RowsBefore(NamedTuple):
    """The weights of some rows, and their state in the optimizer, before they were initialised for new ids."""

    table: str
    rows: torch.Tensor
    weight: torch.Tensor
    state: dict[str, torch.Tensor]


class Insertion:
    """One call of ``find_or_insert``, before its new rows are initialised.

    Args:
        store: the store of the tables.
        operators: the operators that inserted.
        record: what they returned.
        ids: int64 ``[n]``, the batch.
        segments: which of them belong to which table.
    """

    def __init__(
        self,
        store: TableStore,
        operators: HashIndexOperators,
        record: UndoRecord,
        ids: torch.Tensor,
        segments: list[Segment],
    ) -> None:
        self._store, self._operators, self._record = store, operators, record
        self._ids, self._segments = ids, segments
        self._indexes = store.indexes_of([segment.table.name for segment in segments])
        self._versions = [_version(index) for index in self._indexes]  # with this batch
        self._before: list[_RowsBefore] = []

    def keep_rows(self, table: str, rows: torch.Tensor) -> None:
        """Keep what ``rows`` hold, int64 ``[n]``, before they are initialised."""
        weight, optimizer = self._store.weight(table).detach(), self._store.optimizers.get(table)
        state = {}
        if optimizer is not None:
            held = {each.name: optimizer.state.get(each.name) for each in optimizer.rule.states}
            state = {name: _taken(tensor, rows) for name, tensor in held.items() if tensor is not None}
        self._before.append(_RowsBefore(table, rows, _taken(weight, rows), state))

    def undo(self) -> None:
        """Give all rows back with their weights, and forget that the batch was seen.

        A batch whose indexes somebody else has changed since stays as it is, with a warning.
        """
        with self._store.new_rows_lock:
            changed = [index.name for index in self._changed()]
            if changed:
                warnings.warn(
                    f"the batch that was refused stays counted in table {changed[0]!r}, and its new ids keep their "
                    "rows: the index was changed from outside (by another thread, erase, insert or a load) during its "
                    "forward.",
                    stacklevel=2,
                )
                return
            self._operators.undo_insert(
                self._record,
                [segment.begin for segment in self._segments],
                [segment.end for segment in self._segments],
                [index.buffers_as_they_are() for index in self._indexes],
                [index.policy for index in self._indexes],
            )
            for index in self._indexes:
                index.written()
                index.number_state()
            for each in self._before:
                self._restore(each)

    def _changed(self) -> list[HashIndex]:
        """The indexes that are not as the batch left them, apart from later batches that were undone.

        Any batch since then may use what this one gave out, or have got what this one took: an id that lost its row may
        have another one by now.
        """
        changed = []
        inserted = self._record.inserted
        new_rows = inserted.new_rows.split(inserted.report[:, 0].tolist())
        for index, version, segment, rows in zip(self._indexes, self._versions, self._segments, new_rows, strict=True):
            owners = index.row_ids[rows] if _version(index) == version else None
            if owners is None or not bool(torch.isin(owners, self._ids[segment.begin : segment.end]).all()):
                changed.append(index)
        return changed

    def _restore(self, before: _RowsBefore) -> None:
        weight = self._store.weight(before.table)
        weight.data.index_copy_(0, before.rows.to(weight.device), before.weight)
        optimizer = self._store.optimizers.get(before.table)
        for name, rows in before.state.items():
            assert optimizer is not None
            state = optimizer.state[name]
            state.index_copy_(0, before.rows.to(state.device), rows)


def _version(index: HashIndex) -> tuple[int, int, int]:
    return index.adopted.times, index.removals, int(index.counts[BATCHES])


def _taken(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, rows.to(tensor.device))
