"""How one index does: what is read from it for ``recfx.monitor``, and the scalars that are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recfx.hashing import HashIndex
from recfx.hashing.storage import EVAL_COUNTERS
from recfx.kernels.index_buffers import COUNTERS
from recfx.kernels.slot_groups import SLOTS, home_groups


class IndexHealth:
    """Reads one index from time to time, and remembers what it had counted the last time.

    Args:
        index: an index of a table, or of a slice of one.
    """

    def __init__(self, index: HashIndex) -> None:
        self.index = index
        self._bucket_rows = [index.bucket_rows(bucket) for bucket in index.policy.own_buckets]
        self._counted = [0] * (len(COUNTERS) + len(EVAL_COUNTERS))
        self._next_group, self._longest_so_far = 0, 0
        self._longest: int | None = None  # None until any window was read
        self.since_last_time()

    @property
    def is_allocated(self) -> bool:
        """False on the meta device, where there is nothing to read."""
        return not self.index.bucket_taken.is_meta

    def since_last_time(self) -> list[int]:
        """What was counted since the last call, by ``_COUNTS``; nothing if the counts have begun anew."""
        if not self.is_allocated:
            return [0] * len(_COUNTS)
        now = [*self.index.counts.tolist(), *self.index.fold_eval_counts().tolist()]
        before, self._counted = self._counted, now
        differences = [new - old for new, old in zip(now, before, strict=True)]
        if min(differences) < 0:  # the index was reset, or has loaded another state
            return [0] * len(differences)
        return differences

    def buckets(self) -> list[tuple[int, int]]:
        """Per bucket: the taken rows and all rows."""
        if not self.is_allocated:
            return []
        return list(zip(self.index.bucket_taken.tolist(), self._bucket_rows, strict=True))

    @property
    def longest_probe(self) -> int | None:
        """The longest one in the windows that were read; None before the first."""
        return self._longest

    def probe(self, groups: int) -> bool:
        """Read the next window of so many groups of slots; returns whether it was the last one."""
        slot_groups = self.index.buffers_as_they_are().slot_groups
        count = slot_groups.size(0)
        begin = self._next_group if self._next_group < count else 0
        ids = slot_groups[begin : begin + groups, :SLOTS]
        places = (ids != -1).nonzero()
        if places.numel():
            distances = (begin + places[:, 0] - home_groups(ids[places[:, 0], places[:, 1]], count)) % count
            self._longest_so_far = max(self._longest_so_far, int(distances.max()) + 1)
        self._longest = max(self._longest or 0, self._longest_so_far)
        self._next_group = begin + groups
        if self._next_group < count:
            return False
        self._longest, self._longest_so_far, self._next_group = self._longest_so_far, 0, 0
        return True

    def probe_all(self) -> None:
        """Read all groups."""
        self._longest, self._longest_so_far, self._next_group = self.index.longest_probe(), 0, 0


_COUNTS = (*COUNTERS, *(f"eval_{name}" for name in EVAL_COUNTERS))
_SUMMED = ("taken", "rows", *_COUNTS)
_LARGEST = ("worst_bucket", "longest_probe", "evicts", "admits", "shares")


@dataclass(frozen=True)
class Health:
    """The numbers of one table over an interval: of one slice of it, of several, or of those of several ranks.

    Args:
        summed: what is added up: taken rows, all rows, and the counts.
        largest: of what the largest is taken: the share of the fullest bucket, the longest probe (0 if it is not
            known), and what the config says (0 on ranks without a slice, which learn it from the others).
    """

    summed: tuple[int, ...] = (0,) * len(_SUMMED)
    largest: tuple[float, ...] = (0.0,) * len(_LARGEST)

    @classmethod
    def of(cls, parts: Sequence[IndexHealth]) -> Health:
        """One table: all its slices on this rank, of which there may be none."""
        found = cls()
        for part in parts:
            found = found.with_slice(part)
        return found

    def with_slice(self, part: IndexHealth) -> Health:
        """Add one slice, which begins its next interval."""
        buckets, config = part.buckets(), part.index.config
        summed = (sum(taken for taken, _ in buckets), sum(rows for _, rows in buckets), *part.since_last_time())
        fullest = max((taken / rows for taken, rows in buckets if rows), default=0.0)
        largest = (fullest, part.longest_probe or 0, config.evicts, config.admits, config.on_full == "share")
        return self.joined(Health(summed, largest))

    def joined(self, other: Health) -> Health:
        """Both together: other slices, or the same table on another rank."""
        return Health(
            tuple(mine + theirs for mine, theirs in zip(self.summed, other.summed, strict=True)),
            tuple(max(mine, theirs) for mine, theirs in zip(self.largest, other.largest, strict=True)),
        )

    def scalars(self) -> dict[str, float]:
        """The numbers that are shown; see ``Monitor.scalars``."""
        count = dict(zip(_SUMMED, self.summed, strict=True))
        largest = dict(zip(_LARGEST, self.largest, strict=True))
        if not count["rows"]:
            return {}
        found = {"occupancy": count["taken"] / count["rows"], "worst_bucket": largest["worst_bucket"]}
        if largest["longest_probe"]:
            found["longest_probe"] = float(largest["longest_probe"])
        seen, inserted, unseen = count["ids_seen"], count["inserted"], count["unseen_answers"]
        rates = {
            "insert_rate": (True, inserted, seen),
            "evict_rate": (largest["evicts"], count["evicted"], seen),
            "admit_rate": (largest["admits"], inserted, inserted + unseen),
            "unseen_rate": (largest["admits"], unseen, seen),
            "shared_rate": (largest["shares"], count["shared_answers"], seen),
            "eval_unseen_rate": (True, count["eval_unseen_answers"], count["eval_ids_seen"]),
        }
        return found | {name: part / of for name, (has_meaning, part, of) in rates.items() if has_meaning and of}
