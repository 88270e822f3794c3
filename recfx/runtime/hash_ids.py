"""``hash_ids``: maps raw 64-bit ids to rows, through each table's index.

It follows its own mode: training finds or inserts, eval only finds. Ids that the policy answers with zeros are removed
from their bags here, so that no kernel ever sees a row that does not exist; ``mean_divide`` still counts them.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.ir.tables import TableSpec
from recfx.runtime.bags import keep_ids, with_values
from recfx.runtime.base import NodeModule
from recfx.runtime.in_flight import BatchInFlight
from recfx.runtime.table_indexes import TableIndexes
from recfx.runtime.training_checks import is_replay

HashedBatch: TypeAlias = tuple[KeyedJaggedTensor, BatchInFlight | None]
"""Rows in the bags of the ids; and the batch in flight, if its rows must be kept until its backward has run."""


class HashIds(NodeModule):
    """Hash the ids of one collection's tables."""

    def __init__(self, indexes: TableIndexes) -> None:
        super().__init__()
        self.indexes = indexes

    @property
    def collection(self) -> str:
        return self.indexes.collection

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
