"""``hash_ids``: raw 64-bit ids to rows, through each table's index.

Reads its own mode: training finds or inserts, eval only finds. Ids that the policy answers with zeros are taken out of
their bags here, so that no kernel ever meets a row that does not exist; ``mean_divide`` still counts them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import ConversionError, InputError
from recfx.hashing import HashIndex
from recfx.ir.tables import TableSpec
from recfx.kernels import hash_index
from recfx.kernels.index_buffers import BATCHES, EVICTED
from recfx.kernels.pooled_lookup import IndexView
from recfx.nodes.bags import keep_ids, with_values
from recfx.nodes.base import NodeModule
from recfx.nodes.in_flight import BatchesInFlight, BatchInFlight
from recfx.nodes.new_rows import NewRows
from recfx.nodes.raw_ids import RawIds, add_found
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

    Attributes:
        inside_lookup: the lookup behind it finds rows itself: hand raw ids over where that can be done.
    """

    def __init__(
        self, collection: str, tables: tuple[TableSpec, ...], hashed: tuple[str, ...], store: TableStore
    ) -> None:
        super().__init__()
        self.collection = collection
        self.tables = tables
        self._store = store
        self.hashed = hashed
        self.inside_lookup = False
        self._new_rows = NewRows(store)
        self._in_flight = BatchesInFlight()
        evicts_or_admits = [table.hashing.evicts or table.hashing.admits for table in tables if table.hashing]
        self._needs_every_id = any(evicts_or_admits)  # to score or to count it
        self._evicting = [table for table in tables if _evicts(table)]

    @property
    def hashed(self) -> tuple[str, ...]:
        """Names of the tables whose ids go through an index."""
        return self._hashed

    @hashed.setter
    def hashed(self, names: tuple[str, ...]) -> None:
        self._hashed, self._is_hashed = names, frozenset(names)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor | RawIds:
        """``features``: raw ids, keys in the collection's order. Returns rows in the same bags.

        Rows below -1 stand for ``-row - 2`` read without being trained: shared rows of ids that are not admitted.

        Raises:
            TableFullError: a bucket has no row left; no table has changed.
            ConversionError: training without sharding on several ranks (``unsharded_hash_table``), or training a table
                that evicts without a fused optimizer (``evict_needs_fused_optimizer``).
            InputError: ``replayed_ids_evicted``, in a forward that activation checkpointing runs again.
        """
        if self.training:
            self._check_training()
        if features.values().is_meta:
            return features
        if self.inside_lookup and not (self.training and (self._needs_every_id or _is_replay())):
            return RawIds(features, self)
        return self.hash(features)

    def hash(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``forward``, here and now."""
        segments = self.segments(features)
        ids = features.values().to("cpu", torch.int64)
        in_flight = None
        if self.training and not _is_replay():
            in_flight = self._start(ids, segments)
            rows = self.find_or_insert(ids, segments, in_flight)
        else:
            rows = self._find(ids, segments)
        rows = rows.to(features.values().device)
        if all(_answers_are_rows(segment.table, self.training) for segment in segments):
            hashed = with_values(features, rows, features.weights_or_none())
        else:
            hashed = keep_ids(features, rows, rows != -1)
        if in_flight is not None:
            hashed.batch_in_flight = in_flight  # for the lookups: it lives as long as they can run their backward
        return hashed

    def segments(self, features: KeyedJaggedTensor) -> list[Segment]:
        """Where the ids of each hashed table begin and end."""
        borders, hashed = features.offset_per_key(), self._is_hashed
        segments, key = [], 0
        for table in self.tables:
            first, key = key, key + len(table.embedding_names)
            if table.name in hashed:
                segments.append(Segment(table, borders[first], borders[key]))
        return segments

    def find_views(self) -> list[IndexView | None]:
        """The index of each table of the collection, None for tables without."""
        return [
            self._store.index(table.name).view(self.training) if table.name in self._is_hashed else None
            for table in self.tables
        ]

    def _indexes(self, segments: list[Segment]) -> list[HashIndex]:
        return [self._store.index(segment.table.name) for segment in segments]

    # Training

    def find_or_insert(
        self, ids: torch.Tensor, segments: list[Segment], in_flight: BatchInFlight | None = None
    ) -> torch.Tensor:
        """The rows of a batch of training; new ones are initialised. For a full table, nothing has changed."""
        indexes = self._indexes(segments)
        inserted = hash_index.find_or_insert(
            ids,
            [segment.begin for segment in segments],
            [segment.end for segment in segments],
            [index.index_buffers() for index in indexes],
            [index.policy for index in indexes],
            [self._in_flight.of_table(segment.table.name) for segment in segments],
        )
        for index in indexes:
            index.written()
        report = inserted.report.tolist()
        for index, (_, full_bucket) in zip(indexes, report, strict=True):
            if full_bucket >= 0:
                if in_flight is not None:
                    in_flight.end()
                error = index.full_error(full_bucket)
                error.module_path = self.collection
                raise error
        if in_flight is not None:
            in_flight.rows = {table: inserted.rows[begin:end] for (table, begin, end) in _named(segments)}
        begin = 0
        for segment, (count, _) in zip(segments, report, strict=True):
            if count > 0:
                given = slice(begin, begin + count)
                self._new_rows.initialize(segment.table, inserted.new_rows[given], inserted.states_before[given])
            begin += count
        return inserted.rows

    def count_found(self, segments: list[Segment], found: list[int], batches: int) -> None:
        """Count ids of a training batch, by table, that had their rows already."""
        add_found([index.counts for index in self._indexes(segments)], found, batches)

    def _start(self, ids: torch.Tensor, segments: list[Segment]) -> BatchInFlight | None:
        """From here on later batches leave this one's rows alone."""
        evicting = {
            segment.table.name: self._store.index(segment.table.name) for segment in segments if _evicts(segment.table)
        }
        if not evicting:
            return None
        numbers = {table: int(index.counts[BATCHES]) + 1 for table, index in evicting.items()}
        counts = [index.counts for index in evicting.values()]
        return self._in_flight.start(numbers, ids, lambda: sum(int(each[EVICTED]) for each in counts))

    def _check_training(self) -> None:
        self._refuse_replicas()
        for table in self._evicting:
            if (
                torch.is_grad_enabled()
                and table.name not in self._store.optimizers
                and self._store.weight(table.name).requires_grad
            ):
                raise ConversionError(
                    f"table {table.name!r} evicts ids, but its optimizer does not run in the lookup's backward: what "
                    "it holds for a row would go over to the row's next id.",
                    reason="evict_needs_fused_optimizer",
                    module_path=self.collection,
                    what_to_do="call torch.distributed.optim._apply_optimizer_in_backward with SGD, Adagrad, "
                    "RowWiseAdagrad or Adam on the table's parameter; for a whole graph, before it is traced.",
                )

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

    # Eval, and forwards that are run again

    def _find(self, ids: torch.Tensor, segments: list[Segment]) -> torch.Tensor:
        """Rows of all tables; what has none is answered as the policy says. Nothing is inserted."""
        buffers = [index.index_buffers() for index in self._indexes(segments)]
        rows, absent = hash_index.find_tables(
            ids,
            [segment.begin for segment in segments],
            [segment.end for segment in segments],
            [each.slots for each in buffers],
            [each.side_row for each in buffers],
            [each.lock for each in buffers],
            [segment.table.hashing.dense_rows for segment in segments],  # type: ignore[union-attr]
        )
        counts = absent.tolist()
        if self.training:
            self._check_replay(ids, [segment.table for segment, count in zip(segments, counts, strict=True) if count])
        for segment, count in zip(segments, counts, strict=True):
            if count > 0:
                stretch = slice(segment.begin, segment.end)
                rows[stretch] = self._answer_absent(segment.table, ids[stretch], rows[stretch])
        if not self.training:
            self.count_answers(segments, counts)
        return rows

    def count_answers(self, segments: list[Segment], absent: list[int]) -> None:
        """Count what eval mode has answered, so many ids of each table without a row."""
        indexes = self._indexes(segments)
        amounts: list[int] = []
        for segment, count in zip(segments, absent, strict=True):
            amounts += [segment.end - segment.begin, count]
        hash_index.add_counts([index.eval_counts for index in indexes], amounts)

    def _answer_absent(self, table: TableSpec, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        config, index = table.hashing, self._store.index(table.name)
        assert config is not None
        if not self.training:
            return torch.where(rows < 0, index.shared_rows(ids), rows) if config.unseen == "share" else rows
        # A forward that is run again: these ids had no row the first time either.
        shared = index.shared_rows(ids)
        if not config.admits:
            return torch.where(rows < 0, shared, rows)
        unseen = -shared - 2 if config.unseen == "share" else torch.full_like(rows, -1)
        if config.on_full == "share":
            candidates, sightings = index.candidates()
            admitted = torch.isin(ids, candidates[sightings >= config.admit_after])
            unseen = torch.where(admitted, shared, unseen)
        return torch.where(rows < 0, unseen, rows)

    def _check_replay(self, ids: torch.Tensor, missing: list[TableSpec]) -> None:
        """A forward that activation checkpointing runs again must find the rows that it had the first time."""
        evicting = [table.name for table in missing if _evicts(table)]
        if evicting and not self._in_flight.holds_rows_of(ids):
            raise InputError(
                f"activation checkpointing runs a forward again, but ids of table {evicting[0]!r} may have lost their "
                "rows to later batches meanwhile.",
                reason="replayed_ids_evicted",
                module_path=self.collection,
                what_to_do="use torch.utils.checkpoint with use_reentrant=False, or leave the collection out of it.",
            )


def _named(segments: list[Segment]) -> list[tuple[str, int, int]]:
    return [(segment.table.name, segment.begin, segment.end) for segment in segments]


def _is_replay() -> bool:
    """Activation checkpointing runs a forward again inside the backward: the same sightings, not new ones."""
    return torch._C._current_graph_task_id() != _NO_BACKWARD


def _evicts(table: TableSpec) -> bool:
    return table.has_index and table.hashing is not None and table.hashing.evicts


def _answers_are_rows(table: TableSpec, training: bool) -> bool:
    """Whether every id of the table reads some row, so that none is taken out of its bag."""
    assert table.hashing is not None
    return table.hashing.unseen == "share" or (training and not table.hashing.admits)
