"""The nodes that hash: ``hash_ids``, ``hash_lookup``, and the steps of hashing that a pipeline runs one by one.

They follow the mode of ``hash_ids``: training finds or inserts, eval only finds. Ids that the policy answers with zeros
are removed from their bags, so that no kernel ever sees a row that does not exist; ``mean_divide`` still counts them.

``hash_lookup`` is ``hash_ids`` and the ``lookup`` after it in one kernel, which finds rows while it pools them.
``snapshot_indexes`` and ``find_ids`` may run before the batch's step, on another thread, because they only read.
Insertions in the meantime do not make their result wrong; ``insert_ids`` does the rest in batch order.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.hashing import HashIndex
from recfx.ir.operator_graph import node_name
from recfx.ir.tables import TableSpec
from recfx.lowering.registry import Outputs
from recfx.runtime.bags import keep_ids, with_values
from recfx.runtime.base import NodeModule
from recfx.runtime.in_flight import BatchInFlight, is_replay
from recfx.runtime.lookup import Lookup
from recfx.runtime.lowered import Lowered
from recfx.runtime.table_indexes import RowsOfBatch, TableIndexes

HashedBatch: TypeAlias = tuple[KeyedJaggedTensor, BatchInFlight | None]
"""Rows in the bags of the ids; and the batch in flight, if its rows must be kept until its backward has run."""


class HashIds(NodeModule):
    """Hash the ids of one collection's tables."""

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        self.indexes, self.collection = TableIndexes(of), of.collection.name

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor | HashedBatch:
        """``features``: raw ids, with keys in the collection's order. Returns rows in the same bags.

        A value below -1 stands for row ``-value - 2``, which is read but not trained: the shared row of an id that is
        not admitted. If any table evicts, it returns the rows and the batch in flight, which the lookups tell when
        their backwards have run.

        Raises:
            TableFullError: a bucket has no row left; no table has changed.
            ConversionError: training without sharding on several ranks (``unsharded_hash_table``).
            InputError: ``replayed_ids_absent``, in a forward that activation checkpointing runs again;
                ``init_fn_failed`` if a table's own ``init_fn`` cannot refill rows.
        """
        begun = self.indexes.begin(features, self.training)
        hashed = hash_batch(self.indexes, features, self.training) if begun else (features, None)
        return hashed if self.indexes.evicts else hashed[0]


def hash_batch(indexes: TableIndexes, features: KeyedJaggedTensor, training: bool) -> HashedBatch:
    """Hash a whole batch at once, after ``indexes.begin``; errors as for ``HashIds.forward``."""
    segments = indexes.segments(features)
    ids = features.values().to(indexes.device, torch.int64)
    batch = None
    if training and is_replay():
        rows = indexes.find_again(ids, segments)
    elif training:
        batch = indexes.start()
        rows = indexes.find_or_insert(ids, segments)
        indexes.finish(batch, segments, rows, training)
    else:
        rows = indexes.find(ids, segments)
        if torch.is_grad_enabled():  # its backward trains these rows nevertheless
            batch = indexes.start()
            indexes.finish(batch, segments, rows, training)
    rows = rows.to(features.values().device)
    bags_are_elsewhere = features.offsets().device != rows.device  # `to_device` takes ids out of them
    if bags_are_elsewhere or all(answers_are_rows(segment.table, training) for segment in segments):
        return with_values(features, rows, features.weights_or_none()), batch
    return keep_ids(features, rows, rows != -1), batch


def answers_are_rows(table: TableSpec, training: bool) -> bool:
    """Whether no id of the table is removed from its bag: each reads some row, or has a place in the output."""
    assert table.hashing is not None
    return not table.is_pooled or table.hashing.unseen != "zeros" or (training and not table.admits)


class HashLookup(NodeModule):
    """Pool the rows of raw ids; ``lookup`` reads the tables in the order of the KJT's keys.

    If one kernel cannot do that, the node runs ``hash_ids`` and ``lookup`` one after the other, with the same result
    bit for bit. This is the case if the tables have moved to a target without such a kernel; in training, if a table
    counts every id (eviction, admission); in a forward that activation checkpointing runs again; inside torch.func; and
    if tables evict and a backward may follow in eval mode.
    """

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        self.hash_ids, self.lookup = HashIds(of), Lookup(of)
        for module, kind in ((self.hash_ids, "hash_ids"), (self.lookup, "lookup")):
            module.label = node_name(of.collection.name, kind)
            of.runtime.add(f"{of.node.name}.{kind}", kind, module)

    @property
    def two_steps(self) -> str:
        """When the node always runs in two steps: ``""``, ``"in_training"`` or ``"always"``."""
        if self.lookup.kernel and not self.lookup.has_finding_kernel:
            return "always"
        return "in_training" if self.hash_ids.indexes.counts_every_id else ""

    @property
    def now(self) -> dict[str, str]:
        return self.lookup.now | ({"two_steps": self.two_steps} if self.two_steps else {})

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor | Outputs:
        """``features``: raw ids, with keys in the collection's order. Returns what ``Lookup.forward`` does.

        Raises:
            The errors of ``HashIds.forward`` and ``Lookup.forward``.
        """
        indexes, training = self.hash_ids.indexes, self.hash_ids.training
        # More must be done than to find rows if ids are counted, or rows must be kept for a backward.
        counts = indexes.counts_every_id or is_replay() if training else indexes.evicts and torch.is_grad_enabled()
        if counts:
            hashed = self.hash_ids(features)
            return self.lookup(*(hashed if indexes.evicts else (hashed,)))
        if not indexes.begin(features, training):
            return self.lookup(features)
        pooled = self.lookup.pool_ids(features, RowsOfBatch(indexes, features, training))
        return self.lookup(*hash_batch(indexes, features, training)) if pooled is None else pooled


class IndexSnapshot:
    """Views of the indexes' tensors, and the state that they were in.

    Later insertions are visible in the views but do not change any row that was found; erasing, evicting and loading
    do.
    """

    def __init__(self, indexes: list[HashIndex]) -> None:
        self.indexes = indexes
        self.buffers = [index.index_buffers() for index in indexes]
        self._stamps = [_stamp(index) for index in indexes]

    @property
    def holds(self) -> bool:
        """Whether the snapshot still holds: no id has lost its row since, and no other state has been loaded."""
        return [_stamp(index) for index in self.indexes] == self._stamps


class _StepOfHashing(NodeModule):
    def __init__(self, hash_ids: HashIds) -> None:
        super().__init__()
        self.hash_ids = hash_ids


class SnapshotIndexes(_StepOfHashing):
    """Take a snapshot, on the thread that owns the indexes."""

    def forward(self) -> IndexSnapshot | None:
        """Returns None on meta."""
        indexes = self.hash_ids.indexes
        return None if indexes.on_meta else IndexSnapshot(indexes.store.indexes_of(indexes.hashed_in_order))

    @property
    def is_of_use(self) -> bool:
        """Whether rows may be found now, on any thread, for a batch that is hashed later.

        They may not in eval mode, which counts what it answers, or if every id is counted, or if ids may lose their
        rows.
        """
        indexes = self.hash_ids.indexes
        if indexes.counts_every_id or not self.hash_ids.training:
            return False
        return not any(indexes.index(name).slot_groups.is_meta for name in indexes.hashed)


def _stamp(index: HashIndex) -> tuple[Any, ...]:
    # Inserting does not change these; erasing, loading and moving do.
    buffers = index._buffers
    row_ids, row_state = buffers["row_ids"], buffers["row_state"]
    assert row_ids is not None
    assert row_state is not None
    return index.state_number, index.removals, id(row_ids), row_ids._version, row_state._version


class FoundRows(NamedTuple):
    """The rows found for one batch in a snapshot of the indexes.

    ``ids`` and ``rows`` are int64 ``[n]``, on the indexes' device; -1 stands for an id that the index does not hold.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    snapshot: IndexSnapshot


class FindIds(_StepOfHashing):
    """Find rows, on any thread."""

    def forward(self, features: KeyedJaggedTensor, snapshot: IndexSnapshot | None) -> FoundRows | None:
        """``features``: raw ids, with keys in the collection's order. Returns None on meta."""
        if snapshot is None or features.values().is_meta:
            return None
        segments = self.hash_ids.indexes.segments(features)
        ids = features.values().to(self.hash_ids.indexes.device, torch.int64)
        policies = [index.policy for index in snapshot.indexes]
        rows, _ = self.hash_ids.indexes.find_in(snapshot.buffers, policies, ids, segments)
        return FoundRows(ids, rows, snapshot)


class InsertIds(_StepOfHashing):
    """Insert the ids that have no row, in the mode of ``hash_ids``.

    None of the tables evicts or admits ids: ``split_hash_ids`` leaves those whole.
    """

    def forward(self, features: KeyedJaggedTensor, found_rows: FoundRows | None) -> KeyedJaggedTensor:
        """Return and do what ``hash_ids`` would for ``features``.

        ``found_rows`` is not used if its rows are no longer right, in eval mode, and in a forward that activation
        checkpointing runs again.

        Raises:
            The errors of ``HashIds.forward``.
        """
        indexes, training = self.hash_ids.indexes, self.hash_ids.training
        if not indexes.begin(features, training):
            return features
        if found_rows is not None and training and not is_replay() and found_rows.snapshot.holds:
            return self.insert_absent(features, found_rows)
        return hash_batch(indexes, features, training)[0]

    def insert_absent(self, features: KeyedJaggedTensor, found_rows: FoundRows) -> KeyedJaggedTensor:
        """The rows in ``found_rows``, completed for the ids that have none."""
        indexes, rows = self.hash_ids.indexes, found_rows.rows
        if bool((rows == -1).any()):
            indexes.insert_absent(features, found_rows.ids, rows)
        else:
            indexes.count_resident(indexes.segments(features))
        return with_values(features, rows.to(features.values().device), features.weights_or_none())
