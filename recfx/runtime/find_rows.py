"""``find_rows``: the rows of ids in copies of the indexes, where the ids and the tables are.

It stands in graphs of collections whose tables are on a device. In eval mode, neither ids nor rows go through the host,
and the host does not wait for the device. In training, it reads how many ids have no row, and only these go to the host
and get one; where a pipeline has found the rows ahead, it waits for nothing if there are none.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from itertools import count as count_from
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
from recfx.runtime.hash_ids import FoundRows, HashedBatch, answers_are_rows
from recfx.runtime.in_flight import BatchInFlight, is_replay
from recfx.runtime.lowered import Lowered
from recfx.runtime.new_rows import GivenRows
from recfx.runtime.transfers import (
    HOST,
    CopyToHost,
    copy_bags_to_device,
    copy_to_device,
    copy_to_host,
    pins,
    record_stream,
)

_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")


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
    """Copies that are made when they are first needed. Rows that batches give to new ids are added to them; after any
    other change of an index, they are made again. Threads may use them. ``indexes`` returns the index of each of
    ``tables``, in the KJT's order; None for those without one.
    """

    def __init__(self, tables: tuple[TableSpec, ...], indexes: Callable[[], Sequence[HashIndex | None]]) -> None:
        self._indexes = indexes
        self._numbers = {table.name: number for number, table in enumerate(tables)}
        self._last_features = [end - 1 for end in accumulate(len(table.embedding_names) for table in tables)]
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
                copy = self._copy = CopyOfIndexes(device, versions, indexes, self._last_features)
        copy.use()
        return copy

    def add(self, given: Sequence[GivenRows]) -> None:
        """Add the rows that a batch has just given to new ids, if there are copies; the host does not wait."""
        with self._lock:
            if self._copy is None:
                return
            indexes, copy, rows = self._indexes(), self._copy, [_NO_IDS] * len(self._numbers)
            for new in given:
                rows[self._numbers[new.table.name]] = new.rows
            versions = _versions(indexes)
            counts = zip(copy.versions, rows, strict=True)
            if versions != [version and (*version[:2], version[2] + own.numel()) for version, own in counts]:
                self._copy = None  # something else has changed as well
            elif versions != copy.versions:
                copy.add(indexes, rows)
                copy.versions = versions  # last of all: what is interrupted is copied again

    def forget(self) -> None:
        with self._lock:
            self._copy = None

    @property
    def bytes(self) -> int:
        """What the copies take, once they have been made; some bytes per table are left out."""
        return sum(16 * index.slot_count for index in self._indexes() if index is not None)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_copy", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._copy, self._lock = None, threading.Lock()


def _versions(indexes: Sequence[HashIndex | None]) -> list[Any]:
    return [None if index is None else index.map_version for index in indexes]


class CopyOfIndexes:
    """One state of the indexes, of these ``versions``, on one device; ``last_features`` is int64 ``[tables]``. In
    ``trained``, ids without a row share none, because they get one afterwards.
    """

    def __init__(
        self, device: torch.device, versions: list[Any], indexes: Sequence[HashIndex | None], last_features: list[int]
    ) -> None:
        self.device, self.versions = device, versions
        present = [index for index in indexes if index is not None]
        self._slot_counts = [index.slot_count for index in present]
        count, pinned = sum(self._slot_counts), pins(device.type)
        # Behind the slots, each table has an entry for the row of id -1.
        slots = torch.empty(count + len(present), 2, dtype=torch.int64, device="cpu", pin_memory=pinned)
        side_rows = torch.empty(len(present), dtype=torch.int64, device="cpu")
        hash_index.slot_tables_(
            slots[:count], side_rows, self._slot_counts, [index.row_ids for index in present],
            [index.row_state for index in present], [index.lock for index in present],
        )  # fmt: skip
        slots[count:] = side_rows.unsqueeze(1)
        self._taken = (slots[:count, 0] != -1).to(torch.uint8)
        evaluated, ends, numbers = list[IndexFacts](), accumulate(self._slot_counts, initial=0), count_from(1, 2)
        for index in indexes:
            if index is None:
                evaluated.append(IndexFacts.without_index())
            else:
                of_index = index.view(), next(numbers), next(ends), index.slot_count, index.policy.own_rows
                evaluated.append(IndexFacts.of(*of_index))
        trained = [of_table._replace(share_buckets=0) for of_table in evaluated]
        facts = torch.tensor([evaluated, trained], dtype=torch.int64, device="cpu")
        with torch.inference_mode(False):
            self._slots, facts = slots.to(device, non_blocking=True), copy_to_device(facts, device)
            self.indexes = ReadIndexes(self._slots, self._slots[count:].view(-1), facts[0])
            self.trained = self.indexes._replace(facts=facts[1])
            self.last_features = launch.numbers_on(device, tuple(last_features))
        self._written: Any = None  # the stream that last wrote to them, and an event after it
        self._note_stream()

    def add(self, indexes: Sequence[HashIndex | None], rows: Sequence[torch.Tensor]) -> None:
        """Add new ids, which have these rows of each table."""
        self.use()
        own = [(index, new) for index, new in zip(indexes, rows, strict=True) if index is not None]
        ids, ends = torch.cat([index.row_ids[new] for index, new in own]), accumulate(len(new) for _, new in own)
        places = hash_index.take_slots_(self._taken, self._slot_counts, ids, [*ends])
        entries = torch.stack([ids, torch.cat([new for _, new in own])], 1)
        self._slots.index_copy_(0, copy_to_device(places, self.device), copy_to_device(entries, self.device))
        self._note_stream()

    def _note_stream(self) -> None:
        if pins(self.device.type):
            module = torch.get_device_module(self.device)
            stream, event = module.current_stream(self.device), module.Event()
            event.record(stream)
            self._written = (stream, event)

    def use(self) -> None:
        """Let the current stream wait for the copies, and keep their memory until it has read them."""
        if self._written is None:
            return
        stream, event = self._written
        current = torch.get_device_module(self.device).current_stream(self.device)
        if current != stream:
            current.wait_event(event)
            for tensor in (*self.indexes, self.trained.facts, self.last_features):
                record_stream(tensor, current)


@dataclass
class FoundOnDevice(FoundRows):
    """``FoundRows`` where the tables are. ``told`` has where the ids of each table end, and how many of them have no
    row: int64 ``[2, tables]``, on its way to the host.
    """

    told: CopyToHost


class FindRows(NodeModule):
    """Find the rows of one collection's ids in copies of its indexes; in training, only ids without a row go to the
    host. The nodes that it stands for run instead where copies cannot serve: where tables and batch are there is no
    kernel, or they are apart; other processes may write to the indexes; and in training, if a table counts every id
    (eviction, admission), or in a forward that activation checkpointing runs again.
    """

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        (self.hash_ids,) = of.runtime.of("hash_ids")  # which hashes on the host, and whose indexes are copied
        self.to_host, self.to_device = (next(iter(of.runtime.of(kind)), None) for kind in ("to_host", "to_device"))
        self._lookups, self._store = of.runtime.of("lookup"), of.runtime.store
        indexes = self.hash_ids.indexes
        self.copies = IndexCopies(indexes.tables, indexes.by_table)
        indexes.given_out = self.copies.add
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
        """Set the mode; training on the host, which changes the indexes, frees the memory of copies."""
        super().train(mode)
        if mode and not self.serves_training:
            self.copies.forget()
        return self

    @property
    def serves_training(self) -> bool:
        """Whether ids are found in copies in training as well, as long as they are in eval mode."""
        return not self.hash_ids.indexes.counts_every_id

    def forward(self, features: KeyedJaggedTensor | FoundRows) -> KeyedJaggedTensor | HashedBatch:
        """``features``: raw ids, with keys in the collection's order, or what ``finder`` has found. Returns rows in the
        same bags on the device of the tables: what ``to_host``, ``hash_ids`` and ``to_device`` return in the same mode,
        with the same errors, except that ids that read nothing remain as rows of -1 if the lookups take them.
        """
        given, device, indexes = features, self._store.device, self.hash_ids.indexes
        if isinstance(features, FoundRows):
            features = features.features
        if self._goes_to_host(features):
            return self._as_on_host(given if type(given) is FoundRows else features)
        if not indexes.begin(features, self.training):
            return (features, None) if indexes.evicts else features
        if self.training:
            if not isinstance(given, FoundOnDevice) or not given.are_right():
                given = self._find(features, self.copies.on(device), [], [])
            return self._train(given)
        if features.values().device != device:
            features = copy_bags_to_device(features, device)
        rows = self._answer(features, self.copies.on(device))
        values = rows.values()
        if self.leaves_out_absent:
            rows = keep_ids(rows, values, values != -1)
        if not indexes.evicts:
            return rows
        return rows, self._in_flight(features, values) if torch.is_grad_enabled() else None

    def _goes_to_host(self, features: KeyedJaggedTensor) -> bool:
        """Whether the nodes that this one stands for run instead."""
        found_on = features.values().device
        may_copy = not self.training and found_on.type in HOST
        in_turn = self.training and (is_replay() or not self.serves_training)
        return in_turn or (found_on != self._store.device and not may_copy) or bool(self.finds_on_host)

    def finder(self) -> Callable[[KeyedJaggedTensor], KeyedJaggedTensor | FoundRows] | None:
        """As ``HashIds.finder``, whether rows are found on the device or on the host."""
        on_host = self.hash_ids.finder()
        if on_host is None:
            return None
        copies = None if self.finds_on_host else self.copies.on(self._store.device)
        stamped = self.hash_ids.stamped()

        def find(features: KeyedJaggedTensor) -> KeyedJaggedTensor | FoundRows:
            if copies is None or features.values().device != copies.device:
                return on_host(features if self.to_host is None else self.to_host(features))
            return self._find(features, copies, *stamped)

        return find

    def _find(
        self, features: KeyedJaggedTensor, copies: CopyOfIndexes, own: list[HashIndex], stamps: list[tuple[Any, ...]]
    ) -> FoundOnDevice:
        """The rows of a training batch; for ``own`` and ``stamps``, see ``FoundRows``."""
        copies.use()
        ids, ends = _by_table(features, copies)
        rows, absent = find_rows(ids, ends, copies.trained)
        told = CopyToHost([torch.stack([ends, absent])])
        return FoundOnDevice(features, ids, rows, own, stamps, told)

    def _train(self, found: FoundOnDevice) -> KeyedJaggedTensor:
        """Let the ids of a training batch that have no row get one on the host; all are counted."""
        indexes, (told,) = self.hash_ids.indexes, found.told.wait()
        ends, absent = told.tolist()
        sizes = indexes.of_hashed([end - begin for begin, end in pairwise([0, *ends])])
        absent = indexes.of_hashed(absent)
        if not any(absent):
            indexes.insert_rest(_NO_IDS, sizes, absent)
        else:
            places = _places(found.rows < 0, sum(absent))
            (ids,) = copy_to_host([found.ids.index_select(0, places)])
            rows = indexes.insert_rest(ids, sizes, absent)
            found.rows.index_copy_(0, places, copy_to_device(rows, found.rows.device))
        return with_values(found.features, found.rows, found.features.weights_or_none())

    def _answer(self, features: KeyedJaggedTensor, copies: CopyOfIndexes) -> KeyedJaggedTensor:
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

    def _as_on_host(self, features: KeyedJaggedTensor | FoundRows) -> KeyedJaggedTensor | HashedBatch:
        ids = features if self.to_host is None or isinstance(features, FoundRows) else self.to_host(features)
        hashed = self.hash_ids(ids)
        rows, *in_flight = hashed if self.hash_ids.indexes.evicts else (hashed,)
        rows = rows if self.to_device is None else self.to_device(rows)
        return (rows, *in_flight) if in_flight else rows


def _by_table(features: KeyedJaggedTensor, copies: CopyOfIndexes) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of a batch, int64 ``[n]``, and where those of each table end, int64 ``[tables]``; both on the device."""
    ids, stride = features.values().to(torch.int64).contiguous(), features.stride()
    if features.variable_stride_per_key():  # then the host knows how many ids each key has
        ends = copy_to_device(torch.tensor(features.offset_per_key()[1:], device="cpu"), ids.device)
    elif stride == 0:
        return ids, torch.zeros_like(copies.last_features)
    else:
        ends = features.offsets()[stride::stride]
    return ids, ends.index_select(0, copies.last_features).to(torch.int64)


def _places(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Where a mask, of which the host knows the ``count``, is set: int64 ``[count]``. The host does not wait."""
    numbers = mask.cumsum(0, dtype=torch.int32 if mask.numel() < 2**31 else torch.int64) * mask
    places = mask.new_empty(count + 1, dtype=torch.int64)  # all others go before the first
    return places.index_copy_(0, numbers.to(torch.int64), torch.arange(mask.numel(), device=mask.device))[1:]
