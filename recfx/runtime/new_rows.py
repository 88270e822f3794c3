"""Rows that are given to new ids are initialised.

An index marks the rows that it gives out (``NEW`` and ``RENEWED`` in ``recfx.kernels.index.index_buffers``), and the
marks are removed when the rows are initialised: at once in a batch; for ids that users insert themselves, before the
index is next read. Initialising rows twice changes nothing.
"""

from itertools import accumulate
from typing import Any, NamedTuple

import torch

from recfx.errors import InputError
from recfx.ir.tables import TableSpec
from recfx.kernels.index import hash_index
from recfx.kernels.index.index_buffers import NEW, is_uninitialized
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
        """Initialise the rows that are still marked. Only one thread does this at a time."""
        with self._store.new_rows_lock:
            left = []
            for table in self._tables:
                index = self._store.index(table.name)
                if index.has_uninitialized_rows:
                    rows = torch.nonzero(is_uninitialized(index.row_state)).squeeze(1)
                    left.append(GivenRows(table, rows, index.row_state[rows] != NEW))
            self.initialize(left)

    def initialize(self, new_rows: list[GivenRows]) -> None:
        """Write the initial weights for the ids that now have these rows, and reset the optimizers' state.

        Tables whose weights are on the meta device are skipped for now.

        Raises:
            InputError: ``init_fn_failed`` if a table's own ``init_fn`` cannot fill some rows: all stay marked.
        """
        new_rows = [new for new in new_rows if new.rows.numel() > 0 and not self._store.weight(new.table.name).is_meta]
        for new in new_rows:
            if new.table.name not in self._store.optimizers:
                ordinary = self._store.ordinary_optimizers(new.table.name, self._collection)
                weight = self._store.weight(new.table.name)
                ordinary.give_out(weight, new.rows, have_renewed=bool(new.are_renewed.any()))
        for new in new_rows if self._store.device.type == "cpu" else self._left_by_launches(new_rows):
            optimizer = self._store.optimizers.get(new.table.name)
            if optimizer is not None:
                optimizer.reset_rows(new.rows)
            if not new.table.custom_init_fn:
                table, key, low, high, first_column, _ = self._described(new.table)
                ids = self._store.index(new.table.name).row_ids[new.rows]
                initialize_rows(table, new.rows, ids, key, low, high, first_column)
        for new in new_rows:  # user code comes last, because it may fail
            if new.table.custom_init_fn:
                self._fill_again(new)
        self._mark_initialized(new_rows)

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

    def _left_by_launches(self, new_rows: list[GivenRows]) -> list[GivenRows]:
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

    def _fill_again(self, new: GivenRows) -> None:
        """Refill used rows: the table's own ``init_fn`` filled every row once, when the table was built."""
        rows = new.rows[new.are_renewed]
        if rows.numel() == 0:
            return
        name, weight = new.table.name, self._store.weight(new.table.name).data
        init_fn = self._store.init_fns[name]
        assert init_fn is not None
        filled = torch.empty(rows.numel(), weight.shape[1], dtype=weight.dtype, device=weight.device)
        try:
            init_fn(filled)
        except Exception as error:  # raised by user code
            raise InputError(
                f"init_fn of table {name!r} cannot fill {rows.numel()} rows ({type(error).__name__}: {error}); they "
                "are filled before the table is read again.",
                reason="init_fn_failed",
                module_path=self._collection,
                what_to_do="rows that are used again are filled together: let init_fn take any number of rows.",
            ) from error
        weight.index_copy_(0, rows.to(weight.device), filled)
