"""``to_device``: copies rows from the host, where ids are hashed, to the device of the tables."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.runtime.bags import keep_ids_at, with_values
from recfx.runtime.base import NodeModule
from recfx.runtime.host_copies import HOST, copy_bags_to_device, copy_to_device
from recfx.runtime.table_store import TableStore


class ToDevice(NodeModule):
    """Copy rows from pinned memory, without waiting for the device.

    Args:
        store: the store of the tables.
    """

    def __init__(self, store: TableStore) -> None:
        super().__init__()
        self.store = store

    def forward(self, rows: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``rows``: rows on the host; their bags and weights may be on the host or on the device.

        Returns:
            All of them on the device of the tables. Rows that are -1, in bags on the device, are taken out of them.
        """
        device, values = self.store.device, rows.values()
        if values.device.type != "cpu" or device.type in HOST:
            return rows
        weights = rows.weights_or_none()
        if rows.offsets().device.type == "cpu":
            return copy_bags_to_device(rows, device)
        kept = values != -1
        if bool(kept.all()):
            return with_values(rows, copy_to_device(values, device), weights)
        before = torch.zeros(values.numel() + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(kept, 0, out=before[1:])
        positions = torch.nonzero(kept).squeeze(1)
        return keep_ids_at(
            rows,
            copy_to_device(values[positions], device),
            copy_to_device(before, device),
            None if weights is None else weights.index_select(0, copy_to_device(positions, device)),
        )
