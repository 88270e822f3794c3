"""``hash_ids``: raw 64-bit ids to rows, through each table's index.

Reads its own mode: training finds or inserts, eval only finds. Ids that the policy answers with zeros are taken out of
their bags here, so that no kernel ever meets a row that does not exist; ``mean_divide`` still counts them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import InputError, TableFullError
from recfx.hashing import HashIndex
from recfx.ir.tables import TableSpec
from recfx.kernels import hash_index
from recfx.kernels.index_buffers import BATCHES, EVICTED, NEVER_USED
from recfx.kernels.pooled_lookup import IndexView
from recfx.nodes.answers import answer_replayed, answer_unseen
from recfx.nodes.bags import keep_ids, with_values
from recfx.nodes.base import NodeModule
from recfx.nodes.in_flight import BatchesInFlight, BatchInFlight, fingerprint
from recfx.nodes.new_rows import GivenRows, NewRows
from recfx.nodes.prefetched_rows import FoundRows, found_rows
from recfx.nodes.raw_ids import RawIds, add_found
from recfx.nodes.segments import Segment, find_rows
from recfx.nodes.table_store import TableStore
from recfx.nodes.training_checks import check_fused, refuse_replicas

_NO_BACKWARD = -1  # torch's number of the running backward, when there is none


class HashIds(NodeModule):
    """The indexes of one collection's tables.

    Args:
        collection: fully qualified name of the collection, for messages.
        tables: every table of the collection, in the KJT's order.
        hashed: names of those whose ids go through an index; the others pass.
        store: where the indexes and weights are.
        sharded: the ids come from ``input_dist``: no other rank gives rows of these shards, or all give the same.

    Attributes:
        inside_lookup: the lookup behind it finds rows itself: hand raw ids over where that can be done.
        counts_every_id: some table scores or counts all of them: nothing can be done ahead.
    """

    def __init__(
        self,
        collection: str,
        tables: tuple[TableSpec, ...],
        hashed: tuple[str, ...],
        store: TableStore,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        self.collection = collection
        self.tables = tables
        self._store = store
        self._sharded = sharded
        self.hashed = hashed
        self.inside_lookup = False
        self._new_rows = NewRows(collection, tuple(table for table in tables if table.has_index), store)
        self._in_flight = BatchesInFlight()
        self._evicting = [table for table in tables if table.evicts]
        self.counts_every_id = any(table.evicts or table.admits for table in tables)

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
            InputError: ``replayed_ids_evicted`` or ``replayed_ids_absent``, in a forward that activation checkpointing
                runs again; ``init_fn_failed``, where a table's own ``init_fn`` cannot fill rows again.
        """
        if self.training:
            if not self._sharded:
                refuse_replicas(self.collection, self.hashed)
            check_fused(self.collection, self._evicting, self._store)
        if features.values().is_meta or self._on_meta():
            return features
        self._initialize_left()
        found = found_rows(features) if self.training and not self.counts_every_id and not _is_replay() else None
        if found is not None:
            return self._insert_absent(features, found)
        if self.inside_lookup and not self._must_hash_now():
            return RawIds(features, self)
        return self.hash(features)

    def _on_meta(self) -> bool:
        return bool(self._hashed) and self._store.index(self._hashed[0]).row_ids.is_meta

    def _insert_absent(self, features: KeyedJaggedTensor, found: FoundRows) -> KeyedJaggedTensor:
        """The rest, where rows were looked for ahead."""
        raw, rows = RawIds(features, self), found.rows
        if bool((rows == -1).any()):
            raw.insert(found.ids, rows, [])
        else:
            raw.answered([])
        return with_values(features, rows.to(features.values().device), features.weights_or_none())

    def _must_hash_now(self) -> bool:
        """Whether finding rows is not all that is to be done: ids are counted, or rows must stay for a backward."""
        if self.training:
            return self.counts_every_id or _is_replay()
        return bool(self._evicting) and torch.is_grad_enabled()

    def hash(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``forward``, here and now."""
        segments = self.segments(features)
        ids = features.values().to("cpu", torch.int64)
        in_flight = None
        try:
            if self.training and not _is_replay():
                in_flight = self._start(ids)
                self._in_flight.add(in_flight)
                rows = self.find_or_insert(ids, segments, in_flight)
            else:
                rows = self._find(ids, segments)
                if not self.training and torch.is_grad_enabled():  # its backward trains these rows all the same
                    in_flight = self._start(ids)
                    _list_rows(in_flight, segments, rows)
                    self._in_flight.add(in_flight)
            return self._hashed_batch(features, rows, segments, in_flight)
        except BaseException:  # whoever keeps the traceback keeps the batch: it must not hold rows for ever
            if in_flight is not None:
                in_flight.end()
            raise

    def _hashed_batch(
        self,
        features: KeyedJaggedTensor,
        rows: torch.Tensor,
        segments: list[Segment],
        in_flight: BatchInFlight | None,
    ) -> KeyedJaggedTensor:
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

    def index(self, table: str) -> HashIndex:
        """Of a table that has one."""
        return self._store.index(table)

    def _indexes(self, segments: list[Segment]) -> list[HashIndex]:
        return [self._store.index(segment.table.name) for segment in segments]

    # Training

    def find_or_insert(
        self, ids: torch.Tensor, segments: list[Segment], in_flight: BatchInFlight | None = None
    ) -> torch.Tensor:
        """The rows of a batch of training; new ones are initialised. For a full table, nothing has changed."""
        indexes = self._indexes(segments)
        with self._store.new_rows_lock:
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
                    error = index.full_error(full_bucket)
                    raise TableFullError.of(replace(error.diagnostic, path=self.collection))
            _list_rows(in_flight, segments, inserted.rows)
            counts = [count for count, _ in report]
            are_renewed = inserted.states_before != NEVER_USED
            given = zip(segments, inserted.new_rows.split(counts), are_renewed.split(counts), strict=True)
            self._new_rows.initialize([GivenRows(segment.table, rows, renewed) for segment, rows, renewed in given])
        return inserted.rows

    def _initialize_left(self) -> None:
        """Initialise rows that an earlier batch was kept from initialising."""
        if any(self._store.index(name).has_uninitialized_rows for name in self.hashed):
            self._new_rows.initialize_left()

    def count_found(self, segments: list[Segment], found: list[int], batches: int) -> None:
        """Count ids of a training batch, by table, that had their rows already."""
        add_found([index.counts for index in self._indexes(segments)], found, batches)

    def _start(self, ids: torch.Tensor) -> BatchInFlight | None:
        """The batch, for ``BatchesInFlight``; None where no table evicts."""
        evicting = {table.name: self._store.index(table.name) for table in self._evicting}
        if not evicting:
            return None
        for index in evicting.values():
            index.refresh()  # what was loaded in place has another number of batches
        numbers = {table: int(index.counts[BATCHES]) + 1 if self.training else 0 for table, index in evicting.items()}
        indexes = list(evicting.values())
        return BatchInFlight(numbers, fingerprint(ids), lambda: sum(int(index.counts[EVICTED]) for index in indexes))

    # Eval, and forwards that are run again

    def _find(self, ids: torch.Tensor, segments: list[Segment]) -> torch.Tensor:
        """Rows of all tables; what has none is answered as the policy says. Nothing is inserted."""
        indexes = self._indexes(segments)
        buffers = [index.index_buffers() for index in indexes]
        rows, absent = find_rows(ids, segments, buffers, [index.policy for index in indexes])
        counts = absent.tolist()
        if self.training:
            self._check_replay(ids, [segment.table for segment, count in zip(segments, counts, strict=True) if count])
        answer = answer_replayed if self.training else answer_unseen
        for segment, count in zip(segments, counts, strict=True):
            if count > 0:
                stretch = slice(segment.begin, segment.end)
                rows[stretch] = answer(self._store.index(segment.table.name), ids[stretch], rows[stretch])
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

    def _check_replay(self, ids: torch.Tensor, missing: list[TableSpec]) -> None:
        """A forward that activation checkpointing runs again must find the rows that it had the first time."""
        for table in missing:
            if table.hashing is not None and table.hashing.on_full == "error" and not table.admits:
                raise InputError(
                    f"a forward inside a backward meets ids of table {table.name!r} that have no row.",
                    reason="replayed_ids_absent",
                    module_path=self.collection,
                    what_to_do="such a forward is taken for activation checkpointing, which meets no new id. Run "
                    "forwards of new batches outside of backwards; erase no ids between a forward and its backward.",
                )
        evicting = [table.name for table in missing if table.evicts]
        if evicting and not self._in_flight.holds_rows_of(ids):
            raise InputError(
                f"activation checkpointing runs a forward again, but ids of table {evicting[0]!r} may have lost their "
                "rows to later batches meanwhile.",
                reason="replayed_ids_evicted",
                module_path=self.collection,
                what_to_do="use torch.utils.checkpoint with use_reentrant=False, or leave the collection out of it.",
            )


def _list_rows(in_flight: BatchInFlight | None, segments: list[Segment], rows: torch.Tensor) -> None:
    if in_flight is not None:
        in_flight.rows = {segment.table.name: rows[segment.begin : segment.end] for segment in segments}


def _is_replay() -> bool:
    """Activation checkpointing runs a forward again inside the backward: the same sightings, not new ones."""
    return torch._C._current_graph_task_id() != _NO_BACKWARD


def _answers_are_rows(table: TableSpec, training: bool) -> bool:
    """Whether every id of the table reads some row, so that none is taken out of its bag."""
    assert table.hashing is not None
    return table.hashing.unseen == "share" or (training and not table.admits)
