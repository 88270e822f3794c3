"""The nodes that hash: ``hash_ids`` and ``hash_lookup``.

They follow the mode of ``hash_ids``: training finds or inserts, eval only finds. Ids that the policy answers with zeros
are removed from their bags, so that no kernel ever sees a row that does not exist; ``mean_divide`` still counts them.

``hash_lookup`` is ``hash_ids`` and the ``lookup`` after it in one kernel, which finds rows while it pools them.
A pipeline may find the rows of a batch before the batch's step, on another thread, because that only reads; the node
then takes ``FoundRows`` in place of the ids, and inserts those that have no row, in the order of the batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from recfx.hashing import HashIndex
from recfx.ir.operator_graph import node_name
from recfx.ir.tables import TableSpec
from recfx.lowering.registry import Outputs
from recfx.runtime.bags import keep_ids, with_values
from recfx.runtime.base import NodeModule
from recfx.runtime.in_flight import BatchInFlight, is_replay
from recfx.runtime.lookup import Lookup
from recfx.runtime.lowered import Lowered
from recfx.runtime.operators import find_ids, new_call
from recfx.runtime.table_indexes import RowsOfBatch, TableIndexes
from recfx.runtime.transfers import record_stream

HashedBatch: TypeAlias = tuple[KeyedJaggedTensor, BatchInFlight | None]
"""Rows in the bags of the ids; and the batch in flight, if its rows must be kept until its backward has run."""


@dataclass
class FoundRows(Multistreamable):
    """A batch of raw ids whose rows were found ahead of its step. Later insertions do not change any row that was
    found; erasing, evicting and loading do: ``stamps`` has the state that each of ``indexes`` was in before. ``ids``
    and ``rows`` are int64 ``[n]``, on the device of the indexes; -1 stands for an id that the index does not hold.
    """

    features: KeyedJaggedTensor
    ids: torch.Tensor
    rows: torch.Tensor
    indexes: list[HashIndex]
    stamps: list[tuple[Any, ...]]

    def are_right(self) -> bool:
        """Whether the rows are still right: no id has lost its row since, and no other state has been loaded."""
        return list(map(_stamp, self.indexes)) == self.stamps

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (self.features, self.ids, self.rows):
            record_stream(part, stream)


def _stamp(index: HashIndex) -> tuple[Any, ...]:
    # Inserting does not change these; erasing, loading and moving do.
    row_ids, row_state = index.row_ids, index.row_state
    return index.state_number, index.removals, id(row_ids), row_ids._version, row_state._version


class HashIds(NodeModule):
    """Hash the ids of one collection's tables."""

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        self.indexes, self.collection, self.keys = TableIndexes(of), of.collection.name, list(of.collection.local_keys)

    def forward(self, features: KeyedJaggedTensor | FoundRows) -> KeyedJaggedTensor | HashedBatch:
        """The rows, in the same bags, of raw ids, with keys in the collection's order, or of what ``finder`` has found.

        A value below -1 stands for row ``-value - 2``, which is read but not trained: the shared row of an id that is
        not admitted. If any table evicts, it returns the batch in flight as well, which the lookups tell when their
        backwards have run.

        Raises:
            TableFullError: a bucket has no row left; no table has changed.
            ConversionError: training without sharding on several ranks (``unsharded_hash_table``).
            InputError: ``replayed_ids_absent``, in a forward that activation checkpointing runs again;
                ``init_fn_failed`` if a table's own ``init_fn`` cannot refill rows.
        """
        found, indexes = None, self.indexes
        if isinstance(features, FoundRows):
            found, features = features, features.features
        begun = indexes.begin(features, self.training)
        if found is not None and begun and self.training and not is_replay() and found.are_right():
            indexes.insert_absent(features, found.ids, found.rows)
            return with_values(features, found.rows.to(features.values().device), features.weights_or_none())
        hashed = hash_batch(indexes, features, self.training) if begun else (features, None)
        return hashed if indexes.evicts else hashed[0]

    def not_in_graph(self, trains: bool) -> str:
        return ""  # its lookups say what is to be said

    def in_graph(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor | HashedBatch:
        rows = find_ids(features.values(), features.offsets(), features.stride(), new_call(self))
        hashed = with_values(features, rows, features.weights_or_none())
        return (hashed, None) if self.indexes.evicts else hashed

    def find_ids(self, ids: torch.Tensor, offsets: torch.Tensor, batch_size: int) -> torch.Tensor:
        """What the operator of this name does: rows, -1 for ids that read nothing."""
        features, indexes = self.batch(ids, offsets, None, [], batch_size), self.indexes
        if not indexes.begin(features, False):
            return ids.to(torch.int64, copy=True)
        return indexes.find(ids.to(indexes.device, torch.int64), indexes.segments(features)).to(ids.device)

    def batch(
        self, ids: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor | None, lengths: list[int], batch_size: int
    ) -> KeyedJaggedTensor:
        """The arguments of an operator as a batch."""
        known = lengths or (None if batch_size else [0] * len(self.keys))  # TorchRec cannot add up no lengths
        parts: dict[str, Any] = {"offsets": offsets, "stride": batch_size, "length_per_key": known}
        return KeyedJaggedTensor(self.keys, ids, scale, **parts)

    def finder(self) -> Callable[[KeyedJaggedTensor], KeyedJaggedTensor | FoundRows] | None:
        """What finds the rows of a batch ahead of its step, on any thread; called on the thread that owns the indexes.
        None if they may not be found: in eval mode, which counts what it answers, if every id is counted, if ids may
        lose their rows, and on meta.
        """
        indexes = self.indexes
        if indexes.counts_every_id or not self.training or indexes.device.type == "meta":
            return None
        own, stamps = self.stamped()
        buffers = [index.buffers_as_they_are() for index in own]

        def find(features: KeyedJaggedTensor) -> KeyedJaggedTensor | FoundRows:
            if features.values().is_meta:
                return features
            ids = features.values().to(indexes.device, torch.int64)
            rows, _ = indexes.find_in(buffers, [index.policy for index in own], ids, indexes.segments(features))
            return FoundRows(features, ids, rows, own, stamps)

        return find

    def stamped(self) -> tuple[list[HashIndex], list[tuple[Any, ...]]]:
        """The indexes, and the state that each is in, as ``FoundRows`` has them."""
        own = self.indexes.store.indexes_of(self.indexes.hashed_in_order)
        for index in own:
            index.refresh()
        return own, list(map(_stamp, own))


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
    """Pool the rows of raw ids; ``lookup`` reads the tables in the order of the KJT's keys. If one kernel cannot do
    that, the node runs ``hash_ids`` and ``lookup`` one after the other, with the same result bit for bit. This is the
    case if the tables have moved to a target without such a kernel; in training, if a table counts every id (eviction,
    admission); in a forward that activation checkpointing runs again; inside torch.func; if tables evict and a backward
    may follow in eval mode; and if rows were found ahead.
    """

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        self.hash_ids, self.lookup = HashIds(of), Lookup(of)
        for module, kind in ((self.hash_ids, "hash_ids"), (self.lookup, "lookup")):
            module.label = node_name(of.collection.name, kind)
        self.unpooled, self.table_of_feature = self.lookup.unpooled, self.lookup.table_of_feature

    @property
    def two_steps(self) -> str:
        """When the node always runs in two steps: ``""``, ``"in_training"`` or ``"always"``."""
        if self.lookup.kernel and not self.lookup.has_finding_kernel:
            return "always"
        return "in_training" if self.hash_ids.indexes.counts_every_id else ""

    @property
    def now(self) -> dict[str, str]:
        return self.lookup.now | ({"two_steps": self.two_steps} if self.two_steps else {})

    def not_in_graph(self, trains: bool) -> str:
        return self.lookup.not_in_graph(trains)

    def in_graph(self, features: KeyedJaggedTensor) -> torch.Tensor | Outputs:
        return self.lookup.in_graph(features, node=self)

    def look_up(
        self, ids: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor | None, lengths: list[int], size: int,
        *rest: object,
    ) -> list[torch.Tensor]:  # fmt: skip
        """What the operator of this name does."""
        outputs = self.forward(self.hash_ids.batch(ids, offsets, scale, lengths, size))
        return list(outputs) if isinstance(outputs, tuple) else [outputs]

    def forward(self, features: KeyedJaggedTensor | FoundRows) -> torch.Tensor | Outputs:
        """``features``: as in ``HashIds.forward``. Returns what ``Lookup.forward`` does."""
        indexes, training = self.hash_ids.indexes, self.hash_ids.training
        # More must be done than to find rows if ids are counted, or rows must be kept for a backward.
        counts = indexes.counts_every_id or is_replay() if training else indexes.evicts and torch.is_grad_enabled()
        if counts or isinstance(features, FoundRows):
            hashed = self.hash_ids(features)
            return self.lookup(*(hashed if indexes.evicts else (hashed,)))
        if not indexes.begin(features, training):
            return self.lookup(features)
        pooled = self.lookup.pool_ids(features, RowsOfBatch(indexes, features, training))
        return self.lookup(*hash_batch(indexes, features, training)) if pooled is None else pooled
