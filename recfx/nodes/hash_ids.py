"""``hash_ids``: raw 64-bit ids to rows, through each table's index.

Reads its own mode: training finds or inserts, eval only finds. Ids that the policy answers with zeros are taken out of
their bags here, so that no kernel ever meets a row that does not exist; ``mean_divide`` still counts them.
"""

from __future__ import annotations

import torch
import torch.distributed
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import ConversionError, TableFullError
from recfx.ir.tables import TableSpec
from recfx.kernels.row_initialization import initialization_key, initialize_rows
from recfx.nodes.bags import with_values
from recfx.nodes.base import NodeModule
from recfx.nodes.table_store import TableStore


class HashIds(NodeModule):
    """The indexes of one collection's tables.

    Args:
        collection: fully qualified name of the collection, for messages.
        tables: every table of the collection, in the KJT's order.
        hashed: names of those whose ids go through an index; the others pass.
        store: where the indexes and weights are.
    """

    def __init__(
        self, collection: str, tables: tuple[TableSpec, ...], hashed: tuple[str, ...], store: TableStore
    ) -> None:
        super().__init__()
        self.collection = collection
        self.tables = tables
        self.hashed = hashed
        self._store = store

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features``: raw ids, keys in the collection's order. Returns rows in the same bags.

        Raises:
            TableFullError: a bucket has no row left; no table has changed.
            ConversionError: training without sharding on several ranks (``unsharded_hash_table``).
        """
        if self.training:
            self._refuse_replicas()
        ids = features.values().to(torch.int64)
        if self.training:
            rows = self._insert(ids, self._segments(features))
            return with_values(features, rows, features.weights_or_none())
        rows = self._answer(ids, self._segments(features))
        present = rows >= 0
        if bool(present.all()):
            return with_values(features, rows, features.weights_or_none())
        return _drop_absent(features, rows, present)

    def _segments(self, features: KeyedJaggedTensor) -> list[tuple[TableSpec, int, int]]:
        """Where the ids of each hashed table begin and end."""
        borders = features.offset_per_key()
        segments, key = [], 0
        for table in self.tables:
            first, key = key, key + len(table.embedding_names)
            if table.name in self.hashed:
                segments.append((table, borders[first], borders[key]))
        return segments

    def _insert(self, ids: torch.Tensor, segments: list[tuple[TableSpec, int, int]]) -> torch.Tensor:
        rows = ids.clone()
        inserted: list[tuple[TableSpec, torch.Tensor]] = []
        try:
            for table, begin, end in segments:
                rows[begin:end], new_rows = self._store.index(table.name).insert(ids[begin:end])
                inserted.append((table, new_rows))
        except TableFullError as error:
            for table, new_rows in reversed(inserted):
                self._store.index(table.name).undo(new_rows)
            error.module_path = self.collection
            raise
        for table, new_rows in inserted:
            if new_rows.numel() > 0 and not table.custom_init_fn:
                self._initialize(table, new_rows)
        return rows

    def _initialize(self, table: TableSpec, new_rows: torch.Tensor) -> None:
        index = self._store.index(table.name)
        assert table.hashing is not None
        initialize_rows(
            self._store.weight(table.name),
            new_rows,
            index.row_ids[new_rows],
            initialization_key(table.name, table.hashing.seed),
            table.weight_init_min,
            table.weight_init_max,
        )

    def _answer(self, ids: torch.Tensor, segments: list[tuple[TableSpec, int, int]]) -> torch.Tensor:
        rows = ids.clone()
        for table, begin, end in segments:
            rows[begin:end] = self._store.index(table.name).answer(ids[begin:end])
        return rows

    def _refuse_replicas(self) -> None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise ConversionError(
                f"tables {list(self.hashed)} have an index and train unsharded on {distributed.get_world_size()} "
                "ranks: each rank would give the same id another row, and the replicas would diverge.",
                reason="unsharded_hash_table",
                module_path=self.collection,
                what_to_do="shard the collection, or adopt the tables (HashConfig() with dense ids).",
            )


def _drop_absent(features: KeyedJaggedTensor, rows: torch.Tensor, present: torch.Tensor) -> KeyedJaggedTensor:
    """Take ids without a row out of their bags."""
    before = torch.zeros(rows.numel() + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(present, 0, out=before[1:])
    offsets = before.index_select(0, features.offsets().to(torch.int64))
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        features.keys(), rows[present], None if weights is None else weights[present],
        lengths=offsets.diff(), offsets=offsets, stride=features.stride(),
    )  # fmt: skip
