"""Rows that are given to new ids: they are initialised, and a batch that is refused gives them back.

An index marks the rows that it gives out (``NEW`` and ``RENEWED`` in ``recfx.kernels.index.index_buffers``), and the
marks are removed when the rows are initialised: at once in a batch; for ids that users insert themselves, before the
index is next read. Initialising rows twice changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from recfx.errors import InputError
from recfx.hashing import HashIndex
from recfx.ir.tables import TableSpec
from recfx.kernels.index import hash_index
from recfx.kernels.index.hash_index import UndoRecord
from recfx.kernels.index.index_buffers import BATCHES, NEW, is_uninitialized
from recfx.kernels.step.row_initialization import (
    TableOfRows,
    are_in_triton,
    initialization_key,
    initialize_rows,
    initialize_rows_of_tables,
)
from recfx.runtime.table_store import TableStore
from recfx.runtime.transfers import copy_to_device


class Segment(NamedTuple):
    """The ids of one table in a batch: ``values[begin:end]``."""

    table: TableSpec
    begin: int
    end: int


_Tensors = Callable[[], Sequence[torch.Tensor]]


class Insertion:
    """One call of ``find_or_insert``, before its new rows are initialised."""

    def __init__(
        self,
        store: TableStore,
        record: UndoRecord,
        ids: torch.Tensor,
        segments: list[Segment],
    ) -> None:
        self._store, self._record = store, record
        self._ids, self._segments = ids, segments
        self._indexes = store.indexes_of([segment.table.name for segment in segments])
        self._versions = [_version(index) for index in self._indexes]  # with this batch
        self._before: list[tuple[_Tensors, torch.Tensor, list[torch.Tensor]]] = []

    def keep_rows(self, rows: torch.Tensor, tensors: _Tensors) -> None:
        """Keep what ``rows``, int64 ``[n]``, of some tensors hold before they are initialised. ``tensors`` gives these
        when they are kept, and when they are restored: a lookup may have replaced them meanwhile.
        """
        self._before.append((tensors, rows, [tensor.index_select(0, rows.to(tensor.device)) for tensor in tensors()]))

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
            hash_index.undo_insert(
                self._record,
                [segment.begin for segment in self._segments],
                [segment.end for segment in self._segments],
                [index.buffers_as_they_are() for index in self._indexes],
                [index.policy for index in self._indexes],
            )
            for index in self._indexes:
                index.written()
                index.number_state()
            for tensors, rows, kept in self._before:
                for tensor, values in zip(tensors(), kept, strict=False):
                    tensor.index_copy_(0, rows.to(tensor.device), values)

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


def _version(index: HashIndex) -> tuple[int, int, int]:
    return index.adopted.times, index.removals, int(index.counts[BATCHES])


class GivenRows(NamedTuple):
    """Different rows of one table, int64 ``[n]``, that were given to new ids; and which have been used before."""

    table: TableSpec
    rows: torch.Tensor
    are_renewed: torch.Tensor


class NewRows:
    """Initialises new rows of one collection's tables."""

    def __init__(self, collection: str, tables: tuple[TableSpec, ...], store: TableStore) -> None:
        # The graph is first made for whole tables, and a rank may have no shard of some of them.
        self._tables = tuple(table for table in tables if table.name in store.indexes)
        self._collection, self._store = collection, store
        self._attach()

    def _attach(self) -> None:
        for table in self._tables:
            self._store.index(table.name).initialized_by(self.initialize_left)
            self._store.ordinary_optimizers(table.name, self._collection)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()  # copied and unpickled indexes do not have an initializer

    def initialize_left(self) -> None:
        """Initialise the rows that are still marked. Only one thread does this at a time.

        Raises:
            InputError: as in ``initialize``.
        """
        with self._store.new_rows_lock:
            left = []
            for table in self._tables:
                index = self._store.index(table.name)
                if index.has_uninitialized_rows:
                    rows = torch.nonzero(is_uninitialized(index.row_state)).squeeze(1)
                    left.append(GivenRows(table, rows, index.row_state[rows] != NEW))
            self.initialize(left)

    def initialize(self, new_rows: list[GivenRows], insertion: Insertion | None = None) -> None:
        """Write the initial weights for the ids that now have these rows, and reset the optimizers' state.

        Tables whose weights are on the meta device are skipped for now.

        Args:
            new_rows: the rows, by table.
            insertion: what gave out the rows, if it is undone when this fails.

        Raises:
            InputError: ``init_fn_failed`` if a table's own ``init_fn`` cannot fill some rows. Unless the
                insertion is undone, the ids of these rows lose them again; ids that were evicted for them remain
                evicted. All other rows are initialised.
        """
        new_rows = [new for new in new_rows if new.rows.numel() > 0 and not self._store.weight(new.table.name).is_meta]
        failed: InputError | None = None
        for new in new_rows:
            if new.table.name not in self._store.optimizers:
                self._reset_ordinary(new, insertion)
        for new in new_rows if self._store.device.type == "cpu" else self._left_by_launches(new_rows, insertion):
            optimizer = self._store.optimizers.get(new.table.name)
            if insertion is not None:  # right before they are written, when they will be in the cache
                self._keep_rows(new, insertion)
            if optimizer is not None:
                optimizer.reset_rows(new.rows)
            if not new.table.custom_init_fn:
                self._write_initial(new.table, new.rows)
        for new in new_rows:  # user code comes last, because it may fail
            if new.table.custom_init_fn:
                failed = self._fill_again(new, insertion is not None) or failed
        self._mark_initialized(new_rows)
        if failed is not None:
            raise failed

    def _keep_rows(self, new: GivenRows, insertion: Insertion) -> None:
        name = new.table.name

        def tensors() -> list[torch.Tensor]:
            optimizer = self._store.optimizers.get(name)
            states = () if optimizer is None else optimizer.states_of_rows()
            return [self._store.weight(name).data, *(state.tensor for state in states)]

        insertion.keep_rows(new.rows, tensors)

    def _reset_ordinary(self, new: GivenRows, insertion: Insertion | None) -> None:
        """Reset what optimizers that are not fused have of these rows, from other ids or from weight decay."""
        ordinary = self._store.ordinary_optimizers(new.table.name, self._collection)
        states = ordinary.states_of_rows(self._store.weight(new.table.name), bool(new.are_renewed.any()))
        if insertion is not None:
            insertion.keep_rows(new.rows, lambda: [state.tensor for state in states])
        for state in states:
            state.tensor.index_fill_(0, new.rows.to(state.tensor.device), state.value)

    def _mark_initialized(self, new_rows: list[GivenRows]) -> None:
        if not new_rows:
            return
        indexes = [self._store.index(new.table.name) for new in new_rows]
        ends = list(accumulate(new.rows.numel() for new in new_rows))
        hash_index.mark_initialized(
            [index.buffers_as_they_are() for index in indexes],
            [index.policy for index in indexes],
            torch.cat([new.rows for new in new_rows]),
            [0, *ends[:-1]],
            ends,
        )
        for index in indexes:
            index.written()

    def _left_by_launches(self, new_rows: list[GivenRows], insertion: Insertion | None) -> list[GivenRows]:
        """Initialise by kernels in Triton, all tables of one dtype in one launch; what is left to others."""
        left = [new for new in new_rows if new.table.custom_init_fn]
        alike: dict[torch.dtype, list[GivenRows]] = {}
        for new in new_rows:
            if not new.table.custom_init_fn:
                alike.setdefault(self._store.weight(new.table.name).dtype, []).append(new)
        for dtype, group in alike.items():
            # All tables, so that what the device knows of them does not depend on the batch.
            fillable = [table for table in self._tables if not table.custom_init_fn]
            tables = [table for table in fillable if self._store.weight(table.name).dtype == dtype]
            described = [self._described(table) for table in tables]
            if not are_in_triton(described):
                left += group
                continue
            if insertion is not None:
                for new in group:
                    self._keep_rows(new, insertion)
            place = {table.name: number for number, table in enumerate(tables)}
            entries = []
            for new in group:
                ids = self._store.index(new.table.name).row_ids[new.rows]
                entries.append(torch.stack([new.rows, ids, torch.full_like(ids, place[new.table.name])], 1))
            device = described[0].weight.device
            initialize_rows_of_tables(copy_to_device(torch.cat(entries), device), described)
        return left

    def _described(self, table: TableSpec) -> TableOfRows:
        optimizer = self._store.optimizers.get(table.name)
        states = () if optimizer is None else optimizer.states_of_rows()
        low, high = table.weight_init_min, table.weight_init_max
        weight = self._store.weight(table.name)
        return TableOfRows(weight, self._key(table), low, high, table.first_column, states)

    def _key(self, table: TableSpec) -> int:
        assert table.hashing is not None
        # An index that tables of one weight share has the name of one of them.
        name = table.table_name if table.shard_of else self._store.index(table.name).name
        return initialization_key(name, table.hashing.seed)

    def _write_initial(self, table: TableSpec, rows: torch.Tensor) -> None:
        ids, weight = self._store.index(table.name).row_ids[rows], self._store.weight(table.name)
        low, high = table.weight_init_min, table.weight_init_max
        initialize_rows(weight, rows, ids, self._key(table), low, high, table.first_column)

    def _fill_again(self, new: GivenRows, will_be_undone: bool) -> InputError | None:
        """Refill rows that have been used: the table's own ``init_fn`` filled every row once, when the table was built.

        Returns the error if it cannot fill them, in which case the rows are given back, now or by the caller.
        """
        rows = new.rows[new.are_renewed]
        if rows.numel() == 0:
            return None
        name, weight = new.table.name, self._store.weight(new.table.name).data
        init_fn = self._store.init_fns[name]
        assert init_fn is not None
        filled = torch.empty(rows.numel(), weight.shape[1], dtype=weight.dtype, device=weight.device)
        try:
            init_fn(filled)
        except Exception as error:  # raised by user code
            if not will_be_undone:
                self._give_back(new)
            return self._failed(new, error)
        weight.index_copy_(0, rows.to(weight.device), filled)
        return None

    def _give_back(self, new: GivenRows) -> None:
        """Take rows that cannot be filled away from their ids again."""
        index, rows = self._store.index(new.table.name), new.rows[new.are_renewed]
        index.removals += 1
        hash_index.erase(index.row_ids[rows], index.buffers_as_they_are(), index.policy)
        index.written()
        index.number_state()

    def _failed(self, new: GivenRows, error: Exception) -> InputError:
        failed = InputError(
            f"init_fn of table {new.table.name!r} cannot fill {int(new.are_renewed.sum())} rows "
            f"({type(error).__name__}: {error}).",
            reason="init_fn_failed",
            module_path=self._collection,
            what_to_do="rows that are used again are filled together: let init_fn take any number of rows.",
        )
        failed.__cause__ = error
        return failed
