"""``find_rows`` of an exported graph: the row of each id, in indexes that no longer change."""

from typing import NamedTuple

import torch

from recfx.exporter.serving.select_bags import Bags, ServedNode
from recfx.ir.context import FrozenIndex
from recfx.ir.tables import TableSpec
from recfx.kernels.index.buckets import shared_rows


class Completed(NamedTuple):
    """A table whose answers FBGEMM does not know: its position, the row of id -1, and what its index is told."""

    table: int
    side_row: int
    dense_rows: int
    share_buckets: int
    rows: int
    seed: int


class FindFrozenRows(ServedNode):
    """Find the rows of a collection's ids; ids without a row get the answer of their table's policy. The slots of all
    tables are one tensor, which ``fbgemm::pruned_hashmap_lookup`` reads. It leaves the ids of a table without slots as
    they are, and does not find id -1.
    """

    index_attributes: tuple[str, ...] = ("completed",)
    completed: list[Completed]
    first_feature: torch.Tensor
    slot_borders: torch.Tensor
    slots: torch.Tensor

    def __init__(self, tables: tuple[TableSpec, ...], indexes: dict[str, FrozenIndex]) -> None:
        super().__init__()
        self.hashed = [table.name for table in tables if table.has_index]
        self.num_features = sum(len(table.feature_names) for table in tables)
        first_feature, slot_borders = [0], [0]
        for table in tables:
            first_feature.append(first_feature[-1] + len(table.feature_names))
            slot_borders.append(slot_borders[-1] + (indexes[table.name].slots if table.has_index else 0))
        self.completed = []
        for position, table in enumerate(tables):
            side_row = indexes[table.name].side_row if table.has_index else -1
            dense_rows, share_buckets, seed = index_facts(table)
            if side_row >= 0 or dense_rows > 0 or share_buckets != 0:
                facts = Completed(position, side_row, dense_rows, share_buckets, table.num_embeddings, seed)
                self.completed.append(facts)
        self.register_buffer("first_feature", torch.tensor(first_feature))
        self.register_buffer("slot_borders", torch.tensor(slot_borders))
        self.register_buffer("slots", torch.empty(slot_borders[-1], 2, dtype=torch.int64))

    def forward(self, bags: Bags) -> Bags:
        """``bags``: ids. Returns rows in the same bags, -1 for ids without one."""
        batch_size = (bags.offsets.numel() - 1) // self.num_features
        borders = bags.offsets.index_select(0, self.first_feature * batch_size)
        ids = bags.values
        rows = torch.ops.fbgemm.pruned_hashmap_lookup(ids, borders, self.slots, self.slot_borders)
        if len(self.completed) > 0:
            ends: list[int] = borders.tolist()
            for table in self.completed:
                begin, end = ends[table.table], ends[table.table + 1]
                rows[begin:end] = self.complete(table, ids[begin:end], rows[begin:end])
        return Bags(rows, bags.offsets, bags.weights)

    def complete(self, table: Completed, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The rows of one table's ids, completed for id -1, for dense ids, and for ids without a row that share one."""
        rows = torch.where(ids == -1, torch.full_like(rows, table.side_row), rows)
        rows = torch.where((ids >= 0) & (ids < table.dense_rows), ids, rows)
        if table.share_buckets != 0:
            answer = shared_rows(ids, table.rows, table.dense_rows, table.share_buckets, table.seed)
            rows = torch.where(rows < 0, answer, rows)
        return rows


def index_facts(table: TableSpec) -> tuple[int, int, int]:
    """``dense_rows``, ``share_buckets`` and ``seed`` of a table's index; zeros if it has none."""
    config = table.hashing
    if config is None or not table.has_index:
        return 0, 0, 0
    return config.dense_rows, config.share_buckets, config.seed
