"""``find_rows``: the rows of ids in copies of the indexes, where the ids and the tables are.

It stands in graphs of eval mode for collections whose tables are on a device. Neither ids nor rows go through the host,
and the host does not wait for the device. In graphs of training, where it stands only if the tables ask for it, the
host learns how many ids of each table have no row; these go to the host, which gives them rows.
"""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.kernels.build import launch
from recfx.kernels.index.find_rows import find_rows
from recfx.runtime.bags import keep_ids, with_values
from recfx.runtime.base import NodeModule
from recfx.runtime.hash_ids import HashedBatch, HashIds, answers_are_rows
from recfx.runtime.in_flight import BatchInFlight
from recfx.runtime.index_copies import CopyOfIndexes, CountsOnDevice, IndexCopies
from recfx.runtime.lookup import Lookup
from recfx.runtime.new_rows import Segment
from recfx.runtime.training_checks import is_replay
from recfx.runtime.transfers import HOST, ToDevice, ToHost, copy_bags_to_device, copy_to_device, copy_to_host


class FindRows(NodeModule):
    """Find the rows of one collection's ids in copies of its indexes, which follow the indexes.

    The nodes that it stands for run instead in training mode, unless it inserts, and where copies cannot serve: the
    tables or the batch have moved to a device without a kernel, other processes may write to the indexes, or activation
    checkpointing runs a forward again.

    Args:
        hash_ids: hashes on the host; its indexes are copied.
        to_host: the node before it, if there is one.
        to_device: the node after it, if there is one.
        lookups: the nodes that read the rows.
        inserts: whether it finds rows in training as well. Then no table evicts or counts candidates.
    """

    def __init__(
        self,
        hash_ids: HashIds,
        to_host: ToHost | None,
        to_device: ToDevice | None,
        lookups: tuple[Lookup, ...],
        inserts: bool = False,
    ) -> None:
        super().__init__()
        self.inserts = inserts
        self.hash_ids, self.to_host, self.to_device = hash_ids, to_host, to_device
        self._lookups, self._store = lookups, lookups[0].store
        indexes = hash_ids.indexes
        self.copies = IndexCopies(indexes.tables, indexes.by_table, follow=inserts)
        self._counts = CountsOnDevice()
        self._some_read_nothing = not all(
            answers_are_rows(table, training=False) for table in indexes.tables if table.has_index
        )

    @property
    def leaves_out_absent(self) -> bool:
        """Whether ids that read nothing are taken out of their bags, for which the host waits for the device.

        Targets whose kernels take rows of -1 do without.
        """
        return self._some_read_nothing and not all(lookup.takes_absent for lookup in self._lookups)

    @property
    def finds_on_host(self) -> str:
        """Why the nodes that this one stands for run in every mode, as a sentence; ``""`` if they do not."""
        device = self._store.device
        if device.type == "meta":
            return "there is nothing to find on meta."
        if not launch.is_possible(device):
            return f"no target finds rows on {device.type}."
        shared = [index.name for index in self.hash_ids.indexes.by_table() if index is not None and index.is_shared]
        if shared:
            return f"other processes may write to the index of table {shared[0]!r}, which is in shared memory."
        return ""

    def train(self, mode: bool = True) -> FindRows:
        """Set the mode; training mode frees the memory of copies that it does not read: it changes the indexes."""
        super().train(mode)
        if mode and not self.inserts:
            self.copies.forget()
        return self

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor | HashedBatch:
        """``features``: raw ids, with keys in the collection's order.

        Returns:
            Rows in the same bags, on the device of the tables: what ``to_host``, ``hash_ids`` and ``to_device`` return
            in the same mode, except that ids that read nothing remain as rows of -1 if the lookups take them. If any
            table evicts, it returns the rows and the batch in flight, as ``hash_ids`` does.

        Raises:
            The errors of ``HashIds.forward``.
        """
        device, found_on = self._store.device, features.values().device
        hashes_first = self.training and (not self.inserts or is_replay())
        if hashes_first or (found_on != device and found_on.type not in HOST) or self.finds_on_host:
            return self._as_on_host(features)
        indexes = self.hash_ids.indexes
        if not indexes.begin(features, self.training):
            return (features, None) if indexes.evicts else features
        segments = indexes.segments(features) if self.training else []  # before a copy leaves out how long they are
        if found_on != device:
            features = copy_bags_to_device(features, device)
        copies = self.copies.on(device)
        if self.training:
            return self._find_or_insert(features, copies, segments)
        rows = self._find(features, copies)
        values = rows.values()
        if self.leaves_out_absent:
            rows = keep_ids(rows, values, values != -1)
        if not indexes.evicts:
            return rows
        return rows, self._in_flight(features, values) if torch.is_grad_enabled() else None

    def _find(self, features: KeyedJaggedTensor, copies: CopyOfIndexes) -> KeyedJaggedTensor:
        """The rows of a batch, -1 where an id reads nothing; counts it. The host does not wait for the device."""
        ids, ends = _by_table(features, copies)
        rows, absent = find_rows(ids, ends, copies.indexes)
        seen = torch.diff(ends, prepend=ends.new_zeros(1))
        self._counts.add(self.hash_ids.indexes.by_table(), seen, absent)
        return with_values(features, rows, features.weights_or_none())

    def _find_or_insert(
        self, features: KeyedJaggedTensor, copies: CopyOfIndexes, segments: list[Segment]
    ) -> KeyedJaggedTensor:
        """The rows of a training batch. The host waits once for the device, and twice more if ids have no row."""
        indexes, (ids, ends) = self.hash_ids.indexes, _by_table(features, copies)
        rows, absent = find_rows(ids, ends, copies.for_training)
        (absent_per_table,) = copy_to_host([absent])
        if not bool(absent_per_table.any()):
            indexes.count_resident(segments)
            return with_values(features, rows, features.weights_or_none())
        places = torch.nonzero(rows < 0).squeeze(1)
        positions, new_ids = copy_to_host([places, ids.index_select(0, places)])
        given, fresh = indexes.insert_at(positions, new_ids, segments)
        rows.index_copy_(0, places, copy_to_device(given, rows.device))
        stretches = [slice(segment.begin, segment.end) for segment in fresh]
        self.copies.follow(copies, [(new_ids[stretch], given[stretch]) for stretch in stretches])
        return with_values(features, rows, features.weights_or_none())

    def _in_flight(self, features: KeyedJaggedTensor, rows: torch.Tensor) -> BatchInFlight | None:
        """Keep the rows of a batch whose backward will train them, although it is one of eval mode: this waits."""
        indexes = self.hash_ids.indexes
        batch = indexes.start()
        indexes.finish(batch, indexes.segments(features), rows.cpu(), training=False)
        return batch

    def _as_on_host(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor | HashedBatch:
        ids = features if self.to_host is None else self.to_host(features)
        hashed = self.hash_ids(ids)
        rows, *in_flight = hashed if self.hash_ids.indexes.evicts else (hashed,)
        rows = rows if self.to_device is None else self.to_device(rows)
        return (rows, *in_flight) if in_flight else rows


def _by_table(features: KeyedJaggedTensor, copies: CopyOfIndexes) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of a batch, int64 ``[n]``, and where those of each table end, int64 ``[tables]``; both on the device."""
    ids, stride = features.values().to(torch.int64).contiguous(), features.stride()
    if stride == 0:
        return ids, torch.zeros_like(copies.last_features)
    return ids, features.offsets()[stride::stride].index_select(0, copies.last_features).to(torch.int64)
