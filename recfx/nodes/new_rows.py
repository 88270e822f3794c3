"""Rows that get a new id: their weights, and what an optimizer holds for them, start anew."""

from __future__ import annotations

from typing import NamedTuple

import torch

from recfx.errors import InputError
from recfx.ir.tables import TableSpec
from recfx.kernels.index_buffers import NEVER_USED
from recfx.kernels.row_initialization import initialization_key, initialize_rows
from recfx.nodes.table_store import TableStore


class GivenRows(NamedTuple):
    """Rows of one table that a batch has given out.

    Args:
        table: whose rows.
        rows: int64 ``[n]``, all different.
        states_before: uint8 ``[n]``, what they were before (see ``recfx.kernels.index_buffers``).
    """

    table: TableSpec
    rows: torch.Tensor
    states_before: torch.Tensor


class NewRows:
    """Initialises rows of one collection's tables.

    Args:
        store: where the indexes, weights and optimizers are.
    """

    def __init__(self, store: TableStore) -> None:
        self._store = store
        self._keys: dict[tuple[str, int], int] = {}

    def initialize(self, given: list[GivenRows]) -> None:
        """Write the initial weights of the ids that have these rows now, and reset the optimizers' state.

        Raises:
            InputError: ``init_fn_failed``, where a table's own ``init_fn`` cannot fill some rows. Its new ids have no
                rows then; ids that were evicted for them stay so.
        """
        with_rows = [each for each in given if each.rows.numel() > 0]
        for each in with_rows:
            if each.table.name in self._store.optimizers:
                self._store.optimizers[each.table.name].reset_rows(each.rows)
            if self._store.weight(each.table.name).is_meta:
                continue
            if not each.table.custom_init_fn:
                self._write_initial(each.table, each.rows)
        for each in with_rows:  # the users' code last: it may fail
            if each.table.custom_init_fn and not self._store.weight(each.table.name).is_meta:
                self._fill_again(each)

    def _write_initial(self, table: TableSpec, rows: torch.Tensor) -> None:
        assert table.hashing is not None
        named = (table.table_name, table.hashing.seed)
        if named not in self._keys:
            self._keys[named] = initialization_key(*named)
        ids, weight = self._store.index(table.name).row_ids[rows], self._store.weight(table.name)
        low, high = table.weight_init_min, table.weight_init_max
        initialize_rows(weight, rows, ids, self._keys[named], low, high, table.first_column)

    def _fill_again(self, given: GivenRows) -> None:
        """The table's own ``init_fn`` filled every row when the table was built: rows used since are filled again."""
        rows = given.rows[given.states_before != NEVER_USED]
        if rows.numel() == 0:
            return
        name, weight = given.table.name, self._store.weight(given.table.name).data
        init_fn = self._store.init_fns[name]
        assert init_fn is not None
        filled = torch.empty(rows.numel(), weight.shape[1], dtype=weight.dtype, device=weight.device)
        try:
            init_fn(filled)
        except Exception as error:  # the user's own code
            index = self._store.index(name)
            index.erase(index.row_ids[rows])
            raise InputError(
                f"init_fn of table {name!r} cannot fill {rows.numel()} rows ({type(error).__name__}: {error}).",
                reason="init_fn_failed",
                what_to_do="rows that are used again are filled together: let init_fn take any number of rows.",
            ) from error
        weight.index_copy_(0, rows.to(weight.device), filled)
