"""Rows that get a new id: their weights, and what an optimizer holds for them, start anew."""

from __future__ import annotations

import torch

from recfx.ir.tables import TableSpec
from recfx.kernels.index_buffers import NEVER_USED
from recfx.kernels.row_initialization import initialization_key, initialize_rows
from recfx.nodes.table_store import TableStore


class NewRows:
    """Initialises rows of one collection's tables.

    Args:
        store: where the indexes, weights and optimizers are.
    """

    def __init__(self, store: TableStore) -> None:
        self._store = store
        self._keys: dict[tuple[str, int], int] = {}

    def initialize(self, table: TableSpec, rows: torch.Tensor, states_before: torch.Tensor) -> None:
        """Write the initial weights of the ids that have these rows now, and reset the optimizer's state.

        Args:
            table: whose rows.
            rows: int64 ``[n]``, all different.
            states_before: uint8 ``[n]``, what they were before (see ``recfx.kernels.index_buffers``).
        """
        if table.name in self._store.optimizers:
            self._store.optimizers[table.name].reset_rows(rows)
        weight = self._store.weight(table.name)
        if weight.is_meta:
            return
        if table.custom_init_fn:
            self._fill_again(table, weight.data, rows[states_before != NEVER_USED])
            return
        assert table.hashing is not None
        named = (table.name, table.hashing.seed)
        if named not in self._keys:
            self._keys[named] = initialization_key(*named)
        ids = self._store.index(table.name).row_ids[rows]
        initialize_rows(weight, rows, ids, self._keys[named], table.weight_init_min, table.weight_init_max)

    def _fill_again(self, table: TableSpec, weight: torch.Tensor, rows: torch.Tensor) -> None:
        """The table's own ``init_fn`` filled every row when the table was built: rows used since are filled again."""
        if rows.numel() == 0:
            return
        init_fn = self._store.init_fns[table.name]
        assert init_fn is not None
        filled = torch.empty(rows.numel(), weight.shape[1], dtype=weight.dtype, device=weight.device)
        init_fn(filled)
        weight.index_copy_(0, rows.to(weight.device), filled)
