"""``hash_ids``: raw 64-bit ids to rows, through each table's index.

Reads its own mode: training finds or inserts, eval only finds. Ids that the policy answers with zeros are taken out of
their bags here, so that no kernel ever meets a row that does not exist; ``mean_divide`` still counts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import ConversionError, TableFullError
from recfx.ir.tables import TableSpec
from recfx.kernels.hash_index import find_tables
from recfx.kernels.row_initialization import initialization_key, initialize_rows
from recfx.nodes.bags import with_values
from recfx.nodes.base import NodeModule
from recfx.nodes.table_store import TableStore

_NO_BACKWARD = -1  # torch's number of the running backward, when there is none


class Segment(NamedTuple):
    """The ids of one table in a batch: ``values[begin:end]``."""

    table: TableSpec
    begin: int
    end: int


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
        if features.values().is_meta:
            return features
        segments = self._segments(features)
        with self._counted_once(segments):
            rows, complete = self._rows(features.values().to("cpu", torch.int64), segments)
        rows = rows.to(features.values().device)
        if complete:
            return with_values(features, rows, features.weights_or_none())
        return _drop_absent(features, rows, rows >= 0)

    @contextlib.contextmanager
    def _counted_once(self, segments: list[Segment]) -> Iterator[None]:
        """Activation checkpointing runs a forward again inside the backward: the same sightings, not new ones."""
        if torch._C._current_graph_task_id() == _NO_BACKWARD:
            yield
            return
        indexes = [self._store.index(segment.table.name) for segment in segments]
        counts = [index.counts.clone() for index in indexes]
        yield
        for index, before in zip(indexes, counts, strict=True):
            index.counts.copy_(before)

    def _rows(self, ids: torch.Tensor, segments: list[Segment]) -> tuple[torch.Tensor, bool]:
        """A row for every id, -1 where the policy answers with zeros, and whether there is none of those."""
        rows, absent = self._find(ids, segments)
        missing = [segment for segment, count in zip(segments, absent, strict=True) if count]
        if self.training:
            self._insert(ids, rows, missing)
        else:
            self._answer(ids, rows, missing)
        for segment, count in zip(segments, absent, strict=True):
            if count == 0:
                self._store.index(segment.table.name).note_seen(segment.end - segment.begin)
        shared = (segment.table.hashing is not None and segment.table.hashing.unseen == "share" for segment in missing)
        return rows, self.training or all(shared)

    def _segments(self, features: KeyedJaggedTensor) -> list[Segment]:
        """Where the ids of each hashed table begin and end."""
        borders, hashed = features.offset_per_key(), set(self.hashed)
        segments, key = [], 0
        for table in self.tables:
            first, key = key, key + len(table.embedding_names)
            if table.name in hashed:
                segments.append(Segment(table, borders[first], borders[key]))
        return segments

    def _find(self, ids: torch.Tensor, segments: list[Segment]) -> tuple[torch.Tensor, list[int]]:
        """Rows of all tables, -1 where there is none, and how many of those each table has."""
        indexes = [self._store.index(segment.table.name) for segment in segments]
        rows, absent = find_tables(
            ids,
            [segment.begin for segment in segments],
            [segment.end for segment in segments],
            [index.slots for index in indexes],
            [index.side_row for index in indexes],
            [index.config.dense_rows for index in indexes],
        )
        counts = absent.tolist()
        return rows, counts

    def _insert(self, ids: torch.Tensor, rows: torch.Tensor, missing: list[Segment]) -> None:
        inserted: list[tuple[Segment, torch.Tensor]] = []
        try:
            for segment in missing:
                table, begin, end = segment
                rows[begin:end], new_rows = self._store.index(table.name).insert_absent(ids[begin:end], rows[begin:end])
                inserted.append((segment, new_rows))
        except TableFullError as error:
            for segment, new_rows in reversed(inserted):
                index = self._store.index(segment.table.name)
                index.undo(new_rows)
                index.note_seen(segment.begin - segment.end)
            error.module_path = self.collection
            raise
        for segment, new_rows in inserted:
            if new_rows.numel() > 0:
                self._initialize(segment.table, new_rows)

    def _initialize(self, table: TableSpec, new_rows: torch.Tensor) -> None:
        if table.name in self._store.optimizers:
            self._store.optimizers[table.name].reset_rows(new_rows)
        if table.custom_init_fn:
            return
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

    def _answer(self, ids: torch.Tensor, rows: torch.Tensor, missing: list[Segment]) -> None:
        for table, begin, end in missing:
            rows[begin:end] = self._store.index(table.name).answer_absent(ids[begin:end], rows[begin:end])

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
