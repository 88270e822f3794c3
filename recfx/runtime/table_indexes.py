"""What the nodes that hash share: the indexes of one collection's tables, and the state of their batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import ConversionError, InputError, TableFullError
from recfx.hashing import HashIndex
from recfx.hashing.index import buffers_named, views_of
from recfx.ir.operator_graph import names_in
from recfx.kernels.index import hash_index
from recfx.kernels.index.index_buffers import NEVER_USED, IndexBuffers, IndexPolicy, IndexView
from recfx.runtime.in_flight import BatchInFlight, refuse_replicas
from recfx.runtime.lowered import Lowered
from recfx.runtime.new_rows import GivenRows, NewRows, Segment


class TableIndexes:
    """The indexes of one collection's tables: finds, inserts and counts the ids of one batch after the other.

    It is not a module, because the node decides in which mode a batch is hashed.

    Attributes:
        tables: every table of the collection, in the KJT's order.
        hashed: the names of the tables whose ids go through an index; other ids are passed on unchanged.
        counts_every_id: whether any table scores or counts every id. Then each batch is hashed as a whole, in batch
            order.
        evicts: whether any table takes rows away from ids.
        given_out: is told which rows a batch has given to new ids, once they are initialised.
    """

    def __init__(self, of: Lowered) -> None:
        self.collection, self.store, self.tables = of.collection.name, of.runtime.store, of.collection.local
        # No other rank gives out rows of these shards, or all ranks give out the same rows.
        self._group = None if of.runtime.groups is None else of.runtime.groups.pooled
        tables, self.hashed = self.tables, names_in(of.node, "hashed")
        self._is_hashed = frozenset(self.hashed)
        last_keys = accumulate(len(table.embedding_names) for table in tables)
        self._keys_of_hashed = [
            (table, last - len(table.embedding_names), last)
            for table, last in zip(tables, last_keys, strict=True)
            if table.name in self._is_hashed
        ]
        self.hashed_in_order = [table.name for table, *_ in self._keys_of_hashed]
        self._new_rows = NewRows(self.collection, tuple(table for table in tables if table.has_index), self.store)
        self.given_out: Callable[[list[GivenRows]], None] | None = None
        self._evicting = [table for table in tables if table.evicts]
        self.evicts = bool(self._evicting)
        self.counts_every_id = any(table.evicts or table.admits for table in tables)
        if self.evicts and len(of.graph.hashing(self.collection)) > 1:
            raise ConversionError(
                f"several nodes hash ids, but table {self._evicting[0].name!r} evicts: the ids of all tables must be "
                "hashed together, because the rows of a batch are kept together.",
                reason="several_hash_ids",
                module_path=self.collection,
                what_to_do="let the operator take the ids of all tables; or leave it out.",
            )

    @property
    def device(self) -> torch.device:
        """The device of the indexes, on which ids must be to be found."""
        return self.store.index(self.hashed[0]).row_ids.device if self.hashed else torch.device("cpu")

    def begin(self, features: KeyedJaggedTensor, training: bool) -> bool:
        """Call before hashing a batch: checks the mode, and initialises rows that an earlier batch left uninitialised.
        Returns whether there is anything to hash; there is not on meta.
        """
        if training and self._group is None:
            refuse_replicas(self.collection, self.hashed)
        indexes = self.store.indexes_of(self.hashed_in_order)
        if features.values().is_meta or (indexes and indexes[0].row_ids.is_meta):
            return False
        if indexes and hash_index.any_nonzero(buffers_named("uninitialized", indexes)):
            self._new_rows.initialize_left()
        return True

    def segments(self, features: KeyedJaggedTensor) -> list[Segment]:
        """Where the ids of each hashed table are; the host waits for a device if the batch does not know."""
        borders = features.offset_per_key()
        return [Segment(table, borders[first], borders[last]) for table, first, last in self._keys_of_hashed]

    def of_hashed(self, numbers: list[int]) -> list[int]:
        """The numbers that belong to hashed tables, among those of all tables."""
        return [number for table, number in zip(self.tables, numbers, strict=True) if table.name in self._is_hashed]

    def by_table(self) -> list[HashIndex | None]:
        return [self.store.index(table.name) if table.name in self._is_hashed else None for table in self.tables]

    # Training

    def find_or_insert(self, ids: torch.Tensor, segments: list[Segment]) -> torch.Tensor:
        """The rows of a training batch; new ones are initialised. Nothing changes if a table is full."""
        indexes = self.store.indexes_of(self.hashed_in_order)
        with self.store.new_rows_lock:
            inserted = hash_index.find_or_insert(
                ids, [segment.begin for segment in segments], [segment.end for segment in segments],
                [index.index_buffers() for index in indexes], [index.policy for index in indexes],
                [self.store.in_flight.of_table(segment.table.name) for segment in segments],
            )  # fmt: skip
            for index in indexes:
                index.written()
            report = inserted.report.tolist()
            for index, (_, full_bucket) in zip(indexes, report, strict=True):
                if full_bucket >= 0:
                    error = index.full_error(full_bucket)
                    raise TableFullError.of(replace(error.diagnostic, path=self.collection))
            counts = [count for count, _ in report]
            are_renewed = inserted.states_before != NEVER_USED
            per_table = zip(segments, inserted.new_rows.split(counts), are_renewed.split(counts), strict=True)
            new_rows = [GivenRows(segment.table, rows, renewed) for segment, rows, renewed in per_table]
            self._new_rows.initialize(new_rows)
            if self.given_out is not None:
                self.given_out(new_rows)
        return inserted.rows

    def insert_absent(self, features: KeyedJaggedTensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Give rows to the ids of a training batch that have none, and fill them in; the other ids are counted. ``ids``
        and ``rows`` are int64 ``[n]``, on the CPU; a row of -1 is completed in place.
        """
        absent, segments = torch.nonzero(rows < 0).squeeze(1), self.segments(features)
        sizes, counts = [segment.end - segment.begin for segment in segments], [0] * len(segments)
        if absent.numel() > 0:
            edges = torch.tensor([edge for segment in segments for edge in segment[1:]], device="cpu")
            counts = torch.searchsorted(absent, edges).view(-1, 2).diff().flatten().tolist()
        rows[absent] = self.insert_rest(ids[absent], sizes, counts)

    def insert_rest(self, ids: torch.Tensor, sizes: list[int], absent: list[int]) -> torch.Tensor:
        """The rows of those ids of a training batch that had none: int64 ``[n]``, on the CPU, table by table. ``sizes``
        and ``absent`` say how many ids each hashed table has, and how many of these; all are counted.
        """
        if ids.numel() == 0:
            self.count_found(sizes, batches=1)
            return ids
        parts = zip(self._keys_of_hashed, absent, accumulate(absent), strict=True)
        rows = self.find_or_insert(ids, [Segment(table, end - count, end) for (table, *_), count, end in parts])
        resident = [size - count for size, count in zip(sizes, absent, strict=True)]
        self.count_found(resident, batches=0)  # find_or_insert has already counted the batch
        return rows

    def sizes(self, features: KeyedJaggedTensor) -> list[int]:
        """How many ids each hashed table has."""
        borders = features.offset_per_key()
        return [borders[last] - borders[first] for _, first, last in self._keys_of_hashed]

    def count_found(self, resident: list[int], batches: int) -> None:
        # The first two counts of an index are the batches and the ids seen.
        counts = buffers_named("counts", self.store.indexes_of(self.hashed_in_order))
        hash_index.add_counts(counts, [amount for count in resident for amount in (batches, count)])

    def start(self) -> BatchInFlight | None:
        """Begin a forward in which ids may be evicted, or that a backward may follow; ``finish`` ends it. Returns the
        batch; None if no table evicts, or if no backward follows.
        """
        if not self._evicting:
            return None
        in_flight = self.store.in_flight
        in_flight.begin()
        if not torch.is_grad_enabled():
            return None
        trained = [table for table in self._evicting if self.store.weight(table.name).requires_grad]
        tables = [(table, self.store.index(table.name)) for table in trained]
        return BatchInFlight(self.collection, in_flight.turn + in_flight.depth, tables, self._group)

    def finish(self, batch: BatchInFlight | None, segments: list[Segment], rows: torch.Tensor, training: bool) -> None:
        """Keep the rows of a batch from now on, and count the forward."""
        if batch is not None:
            batch.keep({segment.table.name: rows[segment.begin : segment.end] for segment in segments}, training)
            self.store.in_flight.add(batch)
        self.store.in_flight.turn += 1

    def find_again(self, ids: torch.Tensor, segments: list[Segment]) -> torch.Tensor:
        """The rows of a training batch in a forward that activation checkpointing runs again. Nothing is inserted or
        counted; no table evicts or admits ids (``select_features`` refuses).
        """
        rows, counts = self._find(ids, segments)
        for segment, absent in zip(segments, counts, strict=True):
            index = self.store.index(segment.table.name)
            if absent > 0 and index.config.on_full != "share":
                raise InputError(
                    f"a forward inside a backward has ids of table {segment.table.name!r} that have no row.",
                    reason="replayed_ids_absent",
                    module_path=self.collection,
                    what_to_do="erase no ids between a forward and its backward; run forwards of new batches outside "
                    "of backwards.",
                )
            if absent > 0:
                self._share_rows(index, ids, rows, segment)
        return rows

    @staticmethod
    def _share_rows(index: HashIndex, ids: torch.Tensor, rows: torch.Tensor, segment: Segment) -> None:
        """Let the ids of one table that have no row share one, in place."""
        stretch = slice(segment.begin, segment.end)
        rows[stretch] = torch.where(rows[stretch] < 0, index.shared_rows(ids[stretch]), rows[stretch])

    # Eval

    def find(self, ids: torch.Tensor, segments: list[Segment]) -> torch.Tensor:
        """The rows of all tables, or the policy's answers for ids that have none. Nothing is inserted."""
        rows, counts = self._find(ids, segments)
        for segment, count in zip(segments, counts, strict=True):
            index = self.store.index(segment.table.name)
            if count > 0 and index.config.unseen != "zeros":
                self._share_rows(index, ids, rows, segment)
        self.count_answers([segment.end - segment.begin for segment in segments], counts)
        return rows

    def _find(self, ids: torch.Tensor, segments: list[Segment]) -> tuple[torch.Tensor, list[int]]:
        """The rows, -1 for ids that have none; and the number of these per table."""
        indexes = self.store.indexes_of(self.hashed_in_order)
        buffers = [index.index_buffers() for index in indexes]
        rows, absent = self.find_in(buffers, [index.policy for index in indexes], ids, segments)
        return rows, absent.tolist()

    def find_in(
        self,
        buffers: Sequence[IndexBuffers],
        policies: Sequence[IndexPolicy],
        ids: torch.Tensor,
        segments: Sequence[Segment],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the rows of a batch in these buffers, one per segment; only reads. Returns int64 ``[n]`` rows, -1 if a
        table does not hold the id; and int64 ``[tables]``, their number.
        """
        return hash_index.find_tables(
            ids, [segment.begin for segment in segments], [segment.end for segment in segments],
            [buffer.slot_groups for buffer in buffers], [buffer.side_row for buffer in buffers],
            [buffer.lock for buffer in buffers], [policy.own_dense_rows for policy in policies],
            [policy.row_begin for policy in policies],
        )  # fmt: skip

    def count_answers(self, sizes: list[int], absent: list[int]) -> None:
        counts = buffers_named("eval_counts", self.store.indexes_of(self.hashed_in_order))
        amounts = [amount for of_table in zip(sizes, absent, strict=True) for amount in of_table]
        hash_index.add_counts(counts, amounts)


class RowsOfBatch:
    """The indexes for one batch, in the form that kernels that find rows use (``IdsToRows`` in the registry)."""

    def __init__(self, indexes: TableIndexes, features: KeyedJaggedTensor, training: bool) -> None:
        self._indexes, self._features, self.training = indexes, features, training

    def find_views(self) -> list[IndexView | None]:
        indexes = self._indexes
        views = views_of(indexes.store.indexes_of(indexes.hashed_in_order), self.training)
        if len(views) == len(indexes.tables):
            return [*views]
        of_table = dict(zip(indexes.hashed_in_order, views, strict=True))
        return [of_table.get(table.name) for table in indexes.tables]

    def insert(self, ids: torch.Tensor, rows: torch.Tensor, absent_per_table: list[int]) -> None:
        self._indexes.insert_absent(self._features, ids, rows)

    def answered(self, absent_per_table: list[int]) -> None:
        indexes = self._indexes
        sizes = indexes.sizes(self._features)
        if self.training:
            indexes.count_found(sizes, batches=1)
        else:
            absent = dict(zip([table.name for table in indexes.tables], absent_per_table, strict=True))
            indexes.count_answers(sizes, [absent[table] for table in indexes.hashed_in_order])
