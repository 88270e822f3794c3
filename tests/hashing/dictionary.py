"""What the design says of an index, in the plainest Python: the oracle of the index's tests."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from recfx.hashing import HashConfig

COUNTERS = ("batches", "ids_seen", "inserted", "evicted", "shared_answers", "unseen_answers")


def mix64(value: int, seed: int = 0) -> int:
    """All 64 bits, unsigned."""

    def finalizer(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    return finalizer(value % 2**64 ^ finalizer(seed % 2**64))


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


class Entry:
    """An id that has a row."""

    def __init__(self, row: int, last_batch: int, sightings: int) -> None:
        self.row, self.last_batch, self.sightings = row, last_batch, sightings


class Inserted(NamedTuple):
    answers: list[int]  # -1: no row; below -1: -row - 2, a row that is read, but not trained
    new_rows: list[int]
    states_before: list[int]
    evicted_ids: list[int]
    expired_ids: list[int]

    @property
    def rows(self) -> list[int]:
        return [-answer - 2 if answer < -1 else answer for answer in self.answers]


class Dictionary:
    """Ids and their rows, each operation straight from the contract."""

    def __init__(self, rows: int, config: HashConfig) -> None:
        self.rows, self.config = rows, config
        self.dense_rows, self.buckets = config.dense_rows or 0, config.buckets or 1
        self.entries: dict[int, Entry] = {}
        self.candidates: dict[int, int] = {}  # sightings, oldest first
        self.used: set[int] = set()  # rows that have belonged to an id
        self.counters = dict.fromkeys(COUNTERS, 0)

    def is_dense(self, id_: int) -> bool:
        return 0 <= id_ < self.dense_rows

    @cache  # noqa: B019, it lives as long as a test
    def bucket(self, id_: int) -> range:
        number = mix64(id_, self.config.seed) % 2**63 % self.buckets
        begin, end = (self.dense_rows + b * (self.rows - self.dense_rows) // self.buckets for b in (number, number + 1))
        return range(begin, end)

    def find(self, id_: int) -> int:
        if self.is_dense(id_):
            return id_
        return self.entries[id_].row if id_ in self.entries else -1

    def shared(self, id_: int) -> int:
        bucket = self.bucket(id_)
        if self.config.unseen == "row":
            return bucket[-1]
        return bucket[mix64(id_, self.config.seed + 1) % 2**63 % len(bucket)]

    def answer(self, id_: int) -> int:
        row = self.find(id_)
        return self.shared(id_) if row < 0 and self.config.unseen != "zeros" else row

    def owners(self) -> dict[int, int]:
        return {entry.row: id_ for id_, entry in self.entries.items()}

    def insert(self, ids: Sequence[int], batches_in_flight: int = 0) -> Inserted | None:
        """One batch; None: a bucket is full, and only ids have expired. So many batches before it are in flight."""
        config, batch = self.config, self.counters["batches"] + 1
        expired = self._expire(batch - batches_in_flight)
        entries = {id_: Entry(e.row, e.last_batch, e.sightings) for id_, e in self.entries.items()}
        oldest_in_flight = batch - batches_in_flight
        counts = Counter(ids)
        for id_, count in counts.items():
            if id_ in entries:
                entries[id_].last_batch = batch
                entries[id_].sightings += count
        waiting: list[int] = []
        new_rows, states_before, evicted, answers, shared, unseen = [], [], [], {}, 0, 0
        owners = self.owners()
        for id_ in dict.fromkeys(ids):
            if self.is_dense(id_) or id_ in entries:
                continue
            total = counts[id_] + self.candidates.get(id_, 0)
            if total < config.admit_after:
                waiting.append(id_)
                answers[id_] = -self.shared(id_) - 2 if config.unseen != "zeros" else -1
                unseen += counts[id_]
                continue
            given_out = self.bucket(id_)[: -1 if config.unseen == "row" else None]
            free = [row for row in given_out if row not in owners]
            may_go = [owners[r] for r in self.bucket(id_) if r in owners]
            may_go = [owner for owner in may_go if entries[owner].last_batch < oldest_in_flight]
            if free:
                states_before.append(2 if free[0] in self.used else 0)
                new_rows.append(free[0])
            elif config.on_full == "evict" and may_go:
                victim = min(may_go, key=lambda owner: (self.score(entries[owner]), signed(mix64(owner))))
                evicted.append(victim)
                states_before.append(1)
                new_rows.append(entries.pop(victim).row)
            elif config.on_full == "share":
                answers[id_] = self.shared(id_)
                shared += counts[id_]
                waiting.append(id_)
                continue
            else:
                return None
            entries[id_] = Entry(new_rows[-1], batch, total)
            owners[new_rows[-1]] = id_
        self.entries = entries
        self.used.update(new_rows)
        self._count_candidates(waiting, counts)
        for name, count in zip(COUNTERS, (1, len(ids), len(new_rows), len(evicted), shared, unseen), strict=True):
            self.counters[name] += count
        return Inserted([answers.get(id_, self.find(id_)) for id_ in ids], new_rows, states_before, evicted, expired)

    def _expire(self, oldest_in_flight: int) -> list[int]:
        if self.config.ttl_batches is None:
            return []
        last_batches = range(self.counters["batches"] - self.config.ttl_batches + 1, self.counters["batches"] + 1)
        old = {i: e for i, e in self.entries.items() if e.last_batch not in last_batches}
        may_go = [id_ for id_, entry in old.items() if entry.last_batch < oldest_in_flight]
        may_go.sort(key=lambda id_: (self.bucket(id_).start, old[id_].last_batch, signed(mix64(id_))))
        for id_ in may_go:
            del self.entries[id_]
        self.counters["evicted"] += len(may_go)
        return may_go

    def score(self, entry: Entry) -> int:
        return entry.sightings if self.config.evict == "lfu" else entry.last_batch

    def _count_candidates(self, waiting: list[int], counts: dict[int, int]) -> None:
        if self.config.admit_after == 1:
            return
        self.candidates = {id_: count for id_, count in self.candidates.items() if id_ not in self.entries}
        for id_ in [id_ for id_ in waiting if id_ in self.candidates]:
            self.candidates[id_] += counts[id_]
        for id_ in [id_ for id_ in waiting if id_ not in self.candidates]:
            peers = [candidate for candidate in self.candidates if self.bucket(candidate) == self.bucket(id_)]
            if len(peers) == len(self.bucket(id_)):
                del self.candidates[peers[0]]
            self.candidates[id_] = counts[id_]

    def erase(self, ids: Sequence[int]) -> list[int]:
        rows = []
        for id_ in ids:
            entry = self.entries.pop(id_, None)
            self.candidates.pop(id_, None)
            rows.append(-1 if entry is None else entry.row)
        return rows
