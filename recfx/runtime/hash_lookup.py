"""``hash_lookup``: ``hash_ids`` and the ``lookup`` after it in one kernel, which finds rows while it pools them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.kernels.index.index_buffers import IndexView
from recfx.lowering.registry import Outputs
from recfx.runtime.base import NodeModule
from recfx.runtime.hash_ids import HashIds, hash_batch
from recfx.runtime.lookup import Lookup
from recfx.runtime.table_indexes import TableIndexes
from recfx.runtime.training_checks import is_replay


class HashLookup(NodeModule):
    """Pool the rows of raw ids; ``lookup`` reads the tables in the order of the KJT's keys.

    If one kernel cannot do that, the node runs ``hash_ids`` and ``lookup`` one after the other, with the same result
    bit for bit. This is the case if the tables have moved to a target without such a kernel; in training, if a table
    counts every id (eviction, admission); in a forward that activation checkpointing runs again; inside torch.func; and
    if tables evict and a backward may follow in eval mode.
    """

    def __init__(self, hash_ids: HashIds, lookup: Lookup) -> None:
        super().__init__()
        self.hash_ids = hash_ids
        self.lookup = lookup

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
        if self._must_hash_first(training):
            hashed = self.hash_ids(features)
            return self.lookup(*(hashed if indexes.evicts else (hashed,)))
        if not indexes.begin(features, training):
            return self.lookup(features)
        pooled = self.lookup.pool_ids(features, _RowsOfBatch(indexes, features, training))
        return self.lookup(*hash_batch(indexes, features, training)) if pooled is None else pooled

    def _must_hash_first(self, training: bool) -> bool:
        """Whether more than finding rows must be done: ids are counted, or rows must be kept for a backward."""
        if training:
            return self.hash_ids.indexes.counts_every_id or is_replay()
        return self.hash_ids.indexes.evicts and torch.is_grad_enabled()


class _RowsOfBatch:
    """The indexes for one batch, in the form that kernels that find rows use (``IdsToRows`` in the registry)."""

    def __init__(self, indexes: TableIndexes, features: KeyedJaggedTensor, training: bool) -> None:
        self._indexes, self._features, self.training = indexes, features, training

    def find_views(self) -> Sequence[IndexView | None]:
        return self._indexes.find_views(self.training)

    def insert(self, ids: torch.Tensor, rows: torch.Tensor, absent_per_table: list[int]) -> None:
        self._indexes.insert_absent(self._features, ids, rows)

    def answered(self, absent_per_table: list[int]) -> None:
        if self.training:
            self._indexes.count_resident(self._indexes.segments(self._features))
        else:
            self._indexes.count_answered(self._features, absent_per_table)
