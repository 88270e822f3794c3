"""How one index does: what is read from it for ``recfx.monitor``, and the scalars that are made of it.

Reading must not slow training down: it is done in windows that are too small for ATen to wake other threads for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from math import nan

import torch
from torch import Tensor

from recfx.hashing import HashIndex
from recfx.hashing.many_indexes import buffers_named
from recfx.hashing.storage import EVAL_COUNTERS
from recfx.kernels.index.index_buffers import COUNTERS
from recfx.kernels.index.slot_groups import longest_probe


class IndexHealth:
    """Reads one index, of a table or of a slice of one, and remembers what it had counted the last time."""

    def __init__(self, index: HashIndex) -> None:
        self.index = index
        self._bucket_rows = [index.bucket_rows(bucket) for bucket in index.policy.own_buckets]
        self._before, self._adopted = (0,) * len(_COUNTS), index.adopted
        self.counted = self._before  # between the last two calls of end_intervals, by _COUNTS
        self.taken = [0] * len(self._bucket_rows)  # of each bucket, at the last of these calls
        self.longest_probe: int | None = None  # in the windows that were read; None before the first
        self._next_group = 0
        end_intervals((self,))

    @property
    def is_allocated(self) -> bool:
        """False on the meta device, where there is nothing to read."""
        return not self._buffer("counts").is_meta

    def _buffer(self, name: str) -> Tensor:
        return buffers_named(name, (self.index,))[0]

    def notice_loads(self) -> None:
        """Begin the interval with the index's present state, if that was loaded in it.

        Raises:
            CheckpointError: the state that was last loaded is not complete, or not valid.
        """
        index = self.index
        if not index.is_as_noted():
            index.notice_changes()  # torch.distributed.checkpoint loads in place
        if index.adopted.times != self._adopted.times:  # what was counted before the load is of a state that is gone
            self._adopted = index.adopted
            self._before = (*index.adopted.counts, *(0,) * len(EVAL_COUNTERS))
            self.longest_probe, self._next_group = None, 0
        index.fold_eval_counts()

    def end_interval(self, now: tuple[int, ...], taken: list[int]) -> None:
        """Begin the next interval, given the counts and the taken rows of each bucket as they are now."""
        self.taken = taken
        counted = tuple(new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        self.counted = counted if min(counted) >= 0 else (0,) * len(counted)  # someone has written to the counts

    def buckets(self) -> list[tuple[int, int]]:
        """Per bucket: the taken rows and all rows."""
        return list(zip(self.taken, self._bucket_rows, strict=True)) if self.is_allocated else []

    def probe(self) -> bool:
        """Read the next window of groups of slots; returns whether it was the last one."""
        slot_groups, side_row = self._buffer("slot_groups"), self._buffer("side_row")
        begin, end = self._next_group, min(self._next_group + _WINDOW, slot_groups.size(0))
        self.longest_probe = max(self.longest_probe or 0, longest_probe(slot_groups, side_row, begin, end))
        self._next_group = end % slot_groups.size(0)
        return self._next_group == 0

    def probe_all(self) -> None:
        """Read all groups."""
        self.longest_probe, self._next_group = self.index.longest_probe(), 0


def end_intervals(parts: Sequence[IndexHealth]) -> None:
    """Begin the next interval of all of them. The one that ends began with the last call, or with a load since then.

    The counts of all indexes are read together, because a model may have thousands.

    Raises:
        CheckpointError: the state that was last loaded into one of them is not complete, or not valid.
    """
    for part in parts:
        if part.is_allocated:
            part.notice_loads()
        else:
            part.counted = (0,) * len(_COUNTS)
    allocated = [part for part in parts if part.is_allocated]
    indexes = [part.index for part in allocated]
    if not indexes:
        return
    buckets = buffers_named("bucket_taken", indexes)
    sizes = [taken_rows.numel() for taken_rows in buckets]
    counts = torch.stack(buffers_named("counts", indexes)).tolist()
    of_eval = torch.stack(buffers_named("eval_counts", indexes)).tolist()
    taken = iter(torch.cat(buckets).tolist())
    for part, size, in_training, in_eval in zip(allocated, sizes, counts, of_eval, strict=True):
        part.end_interval((*in_training, *in_eval), list(islice(taken, size)))


_WINDOW = 4096  # groups: few enough for less than half a millisecond
_COUNTS = (*COUNTERS, *(f"eval_{name}" for name in EVAL_COUNTERS))
_SUMMED = ("taken", "rows", *_COUNTS)
_LARGEST = ("worst_bucket", "longest_probe", "evicts", "admits", "shares")


@dataclass(frozen=True)
class Health:
    """The numbers of one table over an interval: of one slice of it, of several, or of the slices of several ranks.

    What cannot be added up is joined by its maximum. What is not known is 0: a rank without a slice learns from the
    others what the config says.
    """

    summed: tuple[int, ...] = (0,) * len(_SUMMED)
    largest: tuple[float, ...] = (0.0,) * len(_LARGEST)

    @classmethod
    def of(cls, parts: Sequence[IndexHealth]) -> Health:
        """The numbers of a table's slices on this rank, which may be none, in the intervals that have ended."""
        return reduce(cls.joined, map(cls._of_slice, parts), cls())

    @classmethod
    def _of_slice(cls, part: IndexHealth) -> Health:
        buckets, config = part.buckets(), part.index.config
        summed = (sum(taken for taken, _ in buckets), sum(rows for _, rows in buckets), *part.counted)
        fullest = max((taken / rows for taken, rows in buckets if rows), default=0.0)
        largest = (fullest, part.longest_probe or 0, config.evicts, config.admits, config.on_full == "share")
        return cls(summed, largest)

    def joined(self, other: Health) -> Health:
        """Both together: other slices, or the same table on another rank."""
        return Health(
            tuple(mine + theirs for mine, theirs in zip(self.summed, other.summed, strict=True)),
            tuple(max(mine, theirs) for mine, theirs in zip(self.largest, other.largest, strict=True)),
        )

    def scalars(self) -> dict[str, float]:
        """The numbers that are shown, NaN where there is none yet; see ``Monitor.scalars``."""
        count = dict(zip(_SUMMED, self.summed, strict=True))
        largest = dict(zip(_LARGEST, self.largest, strict=True))
        if not count["rows"]:
            return {}
        state = {
            "occupancy": count["taken"] / count["rows"],
            "worst_bucket": largest["worst_bucket"],
            "longest_probe": float(largest["longest_probe"] or nan),
        }
        seen, inserted, unseen = count["ids_seen"], count["inserted"], count["unseen_answers"]
        rates = {
            "insert_rate": (True, inserted, seen),
            "evict_rate": (largest["evicts"], count["evicted"], seen),
            "admit_rate": (largest["admits"], inserted, inserted + unseen),
            "unseen_rate": (largest["admits"], unseen, seen),
            "shared_rate": (largest["shares"], count["shared_answers"], seen),
            "eval_unseen_rate": (True, count["eval_unseen_answers"], count["eval_ids_seen"]),
        }
        return state | {name: part / of if of else nan for name, (is_counted, part, of) in rates.items() if is_counted}
