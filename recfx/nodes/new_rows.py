"""Rows that get a new id: their weights, and what an optimizer holds for them, start anew.

An index marks the rows that it gives out (``NEW`` and ``RENEWED`` in ``recfx.kernels.index_buffers``), and the marks
are taken off when the rows are initialised. Whatever comes between (Ctrl-C, a signal handler that exits, an error)
leaves marked rows behind, and these are initialised before anybody reads the index again. Doing it twice changes
nothing.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch

from recfx.errors import InputError
from recfx.ir.tables import TableSpec
from recfx.kernels.index_buffers import NEW, is_uninitialized
from recfx.kernels.row_initialization import initialization_key
from recfx.lowering.operators import HASH_INDEX, ROW_INITIALIZATION, OperatorsByDevice
from recfx.nodes.table_store import TableStore


class GivenRows(NamedTuple):
    """Rows of one table that have got new ids.

    Args:
        table: whose rows.
        rows: int64 ``[n]``, all different.
        are_renewed: bool ``[n]``, which of them have been used before.
    """

    table: TableSpec
    rows: torch.Tensor
    are_renewed: torch.Tensor


class NewRows:
    """Initialises rows of one collection's tables.

    Args:
        collection: fully qualified name of the collection, for messages.
        tables: those of its tables that have an index.
        store: where the indexes, weights and optimizers are.
    """

    def __init__(self, collection: str, tables: tuple[TableSpec, ...], store: TableStore) -> None:
        # A graph of whole tables is made before that of a rank, which may have no shard of some.
        self._tables = tuple(table for table in tables if table.name in store.indexes)
        self._collection, self._store = collection, store
        self._keys: dict[tuple[str, int], int] = {}
        self._operators, self._index_operators = OperatorsByDevice(ROW_INITIALIZATION), OperatorsByDevice(HASH_INDEX)
        self._attach()

    def _attach(self) -> None:
        for table in self._tables:
            self._store.index(table.name).initialized_by(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()  # indexes that were copied or unpickled do not know it

    def initialize_left(self) -> None:
        """Initialise the rows that are still marked. Threads wait for each other.

        Raises:
            InputError: as ``initialize``.
        """
        with self._store.new_rows_lock:
            left = []
            for table in self._tables:
                index = self._store.index(table.name)
                if index.has_uninitialized_rows:
                    rows = torch.nonzero(is_uninitialized(index.row_state)).squeeze(1)
                    left.append(GivenRows(table, rows, index.row_state[rows] != NEW))
            self.initialize(left)

    def initialize(self, given: list[GivenRows]) -> None:
        """Write the initial weights of the ids that have these rows now, and reset the optimizers' state.

        Tables whose weights are on the meta device are left for later.

        Raises:
            InputError: ``init_fn_failed``, where a table's own ``init_fn`` cannot fill some rows. The ids of these have
                no rows then; ids that were evicted for them stay so. All other rows are initialised.
        """
        given = [each for each in given if each.rows.numel() > 0 and not self._store.weight(each.table.name).is_meta]
        failed: InputError | None = None
        for each in given:
            optimizer = self._store.optimizers.get(each.table.name)
            if optimizer is not None:
                optimizer.reset_rows(each.rows)
            if not each.table.custom_init_fn:
                self._write_initial(each.table, each.rows)
        for each in given:  # the users' code last: it may fail
            if each.table.custom_init_fn:
                failed = self._fill_again(each) or failed
        self._mark_initialized(given)
        if failed is not None:
            raise failed

    def _mark_initialized(self, given: list[GivenRows]) -> None:
        if not given:
            return
        indexes = [self._store.index(each.table.name) for each in given]
        ends = list(accumulate(each.rows.numel() for each in given))
        self._index_operators.on(indexes[0].row_ids.device).mark_initialized(
            [index.buffers_as_they_are() for index in indexes],
            [index.policy for index in indexes],
            torch.cat([each.rows for each in given]),
            [0, *ends[:-1]],
            ends,
        )
        for index in indexes:
            index.written()

    def _write_initial(self, table: TableSpec, rows: torch.Tensor) -> None:
        assert table.hashing is not None
        named = (table.table_name, table.hashing.seed)
        if named not in self._keys:
            self._keys[named] = initialization_key(*named)
        ids, weight = self._store.index(table.name).row_ids[rows], self._store.weight(table.name)
        low, high = table.weight_init_min, table.weight_init_max
        initialize_rows = self._operators.on(weight.device).initialize_rows
        initialize_rows(weight, rows, ids, self._keys[named], low, high, table.first_column)

    def _fill_again(self, given: GivenRows) -> InputError | None:
        """The table's own ``init_fn`` filled every row when the table was built: rows used since are filled again.

        Returns:
            the error, where it cannot; the rows are given back then.
        """
        rows = given.rows[given.are_renewed]
        if rows.numel() == 0:
            return None
        name, weight = given.table.name, self._store.weight(given.table.name).data
        init_fn = self._store.init_fns[name]
        assert init_fn is not None
        filled = torch.empty(rows.numel(), weight.shape[1], dtype=weight.dtype, device=weight.device)
        try:
            init_fn(filled)
        except Exception as error:  # the user's own code
            return self._give_back(given, error)
        weight.index_copy_(0, rows.to(weight.device), filled)
        return None

    def _give_back(self, given: GivenRows, error: Exception) -> InputError:
        """The ids of rows that cannot be filled lose them again."""
        index, rows = self._store.index(given.table.name), given.rows[given.are_renewed]
        index.removals += 1
        self._index_operators.on(rows.device).erase(index.row_ids[rows], index.buffers_as_they_are(), index.policy)
        index.written()
        failed = InputError(
            f"init_fn of table {given.table.name!r} cannot fill {rows.numel()} rows ({type(error).__name__}: {error}).",
            reason="init_fn_failed",
            module_path=self._collection,
            what_to_do="rows that are used again are filled together: let init_fn take any number of rows.",
        )
        failed.__cause__ = error
        return failed
