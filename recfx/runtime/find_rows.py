"""``find_rows``: the rows of ids in copies of the indexes, where the ids and the tables are.

It stands in graphs of eval mode for collections whose tables are on a device. Neither ids nor rows go through the host,
and the host does not wait for the device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.hashing import HashIndex
from recfx.ir.tables import TableSpec
from recfx.kernels.build import launch
from recfx.kernels.index import hash_index
from recfx.kernels.index.find_rows import IndexFacts, ReadIndexes, find_rows
from recfx.runtime.bags import keep_ids, with_values
from recfx.runtime.base import NodeModule
from recfx.runtime.hash_ids import HashedBatch, answers_are_rows
from recfx.runtime.in_flight import BatchInFlight
from recfx.runtime.lowered import Lowered
from recfx.runtime.transfers import HOST, copy_bags_to_device, pins, record_stream


class CountsOnDevice:
    """How many ids of each table were seen in eval mode, and how many of them had no row of their own. Threads may add
    to them, on streams of their own. Indexes keep the counts alive, which therefore refer to nothing that holds
    weights.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._indexes: list[weakref.ref[HashIndex] | None] = []
        self._device: torch.device | None = None
        self._of_stream: dict[Any, torch.Tensor] = {}

    def add(self, indexes: Sequence[HashIndex | None], seen: torch.Tensor, absent: torch.Tensor) -> None:
        """Count one batch, given int64 ``[tables]`` on the device; the host does not wait. ``indexes`` has None for
        tables without an index.
        """
        device = seen.device
        with self._lock:
            if [None if ref is None else ref() for ref in self._indexes] != list(indexes) or self._device != device:
                self.fold()
                self._indexes = [None if index is None else weakref.ref(index) for index in indexes]
                self._device = device
            stream = torch.get_device_module(device).current_stream(device) if pins(device.type) else None
            counted = self._of_stream.get(stream)
            if counted is None:
                with torch.inference_mode(False):  # batches outside of inference mode are added as well
                    counted = self._of_stream[stream] = torch.zeros(seen.numel(), 2, dtype=torch.int64, device=device)
                for index in indexes:
                    if index is not None:
                        index.counted_elsewhere(self.fold)
            counted.add_(torch.stack([seen, absent], dim=1))

    def fold(self) -> None:
        """Add the counts to those of the indexes, and begin anew; waits for the device."""
        with self._lock:
            if not self._of_stream:
                return
            if self._device is not None and self._device.type not in HOST:
                torch.get_device_module(self._device).synchronize(self._device)
            counts = torch.stack([counted.cpu() for counted in self._of_stream.values()]).sum(0).tolist()
            self._of_stream = {}
            pairs = [(None if ref is None else ref(), count) for ref, count in zip(self._indexes, counts, strict=True)]
            present = [(index, count) for index, count in pairs if index is not None and not index.eval_counts.is_meta]
            amounts = [amount for _, count in present for amount in count]
            hash_index.add_counts([index.eval_counts for index, _ in present], amounts)


class IndexCopies:
    """Copies that are made when they are first needed, and again after an index has changed. Threads may use them.
    ``indexes`` returns the index of each of ``tables``, in the KJT's order; None for those without one.
    """

    def __init__(self, tables: tuple[TableSpec, ...], indexes: Callable[[], Sequence[HashIndex | None]]) -> None:
        self._indexes = indexes
        features = [len(table.embedding_names) for table in tables]
        self._last_features = [end - 1 for end in accumulate(features)]
        self._copy: CopyOfIndexes | None = None
        self._lock = threading.Lock()

    def on(self, device: torch.device) -> CopyOfIndexes:
        """Copies on ``device`` that the current stream may read, of the indexes as they are now."""
        indexes = self._indexes()
        for index in indexes:
            if index is not None:
                index.refresh()
        # Before the slots are read: if something changes from here on, the next batch copies again.
        versions = _versions(indexes)
        with self._lock:
            copy = self._copy
            if copy is None or copy.device != device or copy.versions != versions:
                copy = self._copy = None  # two copies at once may not fit
                on_host = self._read(indexes, device)
                copy = self._copy = CopyOfIndexes(device, versions, on_host, self._last_features)
        copy.use()
        return copy

    def forget(self) -> None:
        with self._lock:
            self._copy = None

    @property
    def bytes(self) -> int:
        """What the copies take, once they have been made; some bytes per table are left out."""
        return sum(16 * index.slot_count for index in self._indexes() if index is not None)

    def _read(self, indexes: Sequence[HashIndex | None], device: torch.device) -> ReadIndexes:
        present = [index for index in indexes if index is not None]
        slot_counts = [index.slot_count for index in present]
        ends = [0, *accumulate(slot_counts)]
        facts, number = [IndexFacts.without_index()] * len(indexes), 0
        for table, index in enumerate(indexes):
            if index is not None:
                rows = index.policy.own_rows
                facts[table] = IndexFacts.of(index.view(), number, ends[number], slot_counts[number], rows)
                number += 1
        pinned = pins(device.type)
        slots = torch.empty(ends[-1], 2, dtype=torch.int64, device="cpu", pin_memory=pinned)
        side_rows = torch.empty(len(present), dtype=torch.int64, device="cpu", pin_memory=pinned)
        hash_index.slot_tables_(
            slots, side_rows, slot_counts, [index.row_ids for index in present],
            [index.row_state for index in present], [index.lock for index in present],
        )  # fmt: skip
        return ReadIndexes(slots, side_rows, torch.tensor(facts, dtype=torch.int64, device="cpu", pin_memory=pinned))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_copy", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._copy, self._lock = None, threading.Lock()


def _versions(indexes: Sequence[HashIndex | None]) -> list[Any]:
    return [None if index is None else index.map_version for index in indexes]


class CopyOfIndexes:
    """One state of the indexes, on one device; ``last_features`` is int64 ``[tables]``."""

    def __init__(
        self, device: torch.device, versions: list[Any], on_host: ReadIndexes, last_features: list[int]
    ) -> None:
        self.device, self.versions = device, versions
        with torch.inference_mode(False):
            self.indexes = ReadIndexes(*(tensor.to(device, non_blocking=True) for tensor in on_host))
            self.last_features = launch.numbers_on(device, tuple(last_features))
        self._made: Any = None  # the stream that copies, and an event after it
        if pins(device.type):
            module = torch.get_device_module(device)
            stream, event = module.current_stream(device), module.Event()
            event.record(stream)
            self._made = (stream, event)

    def use(self) -> None:
        """Let the current stream wait for the copies, and keep their memory until it has read them."""
        if self._made is None:
            return
        stream, event = self._made
        current = torch.get_device_module(self.device).current_stream(self.device)
        if current != stream:
            current.wait_event(event)
            for tensor in (*self.indexes, self.last_features):
                record_stream(tensor, current)


class FindRows(NodeModule):
    """Find the rows of one collection's ids in copies of its indexes, which follow the indexes. The nodes that it
    stands for run instead in training mode, and where copies cannot serve: the tables or the batch have moved to a
    device without a kernel, or other processes may write to the indexes.
    """

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        (self.hash_ids,) = of.runtime.of("hash_ids")  # which hashes on the host, and whose indexes are copied
        self.to_host, self.to_device = (next(iter(of.runtime.of(kind)), None) for kind in ("to_host", "to_device"))
        self._lookups, self._store = of.runtime.of("lookup"), of.runtime.store
        indexes = self.hash_ids.indexes
        self.copies = IndexCopies(indexes.tables, indexes.by_table)
        self._counts = CountsOnDevice()
        self._some_read_nothing = not all(
            answers_are_rows(table, training=False) for table in indexes.tables if table.has_index
        )

    @property
    def leaves_out_absent(self) -> bool:
        """Whether ids that read nothing are taken out of their bags, for which the host waits for the device. Targets
        whose kernels take rows of -1 do without.
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
        """Set the mode; training mode, which changes the indexes, frees the memory of copies."""
        super().train(mode)
        if mode:
            self.copies.forget()
        return self

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor | HashedBatch:
        """``features``: raw ids, with keys in the collection's order. Returns rows in the same bags on the device of
        the tables: what ``to_host``, ``hash_ids`` and ``to_device`` return in the same mode, except that ids that read
        nothing remain as rows of -1 if the lookups take them.
        """
        device, found_on = self._store.device, features.values().device
        if self.training or (found_on != device and found_on.type not in HOST) or self.finds_on_host:
            return self._as_on_host(features)
        indexes = self.hash_ids.indexes
        if not indexes.begin(features, self.training):
            return (features, None) if indexes.evicts else features
        if found_on != device:
            features = copy_bags_to_device(features, device)
        rows = self._find(features, self.copies.on(device))
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
