"""How one index does: what is read from it for ``recfx.monitor``, and the scalars that are made of it.

Reading must not slow training down: it is done in windows that are too small for ATen to wake other threads for.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from torch import Tensor

from recfx.hashing import HashIndex
from recfx.hashing.index import buffers_named
from recfx.hashing.storage import EVAL_COUNTERS
from recfx.kernels.index.index_buffers import COUNTERS
from recfx.kernels.index.slot_groups import longest_probe

_WINDOW = 4096  # groups: few enough for less than half a millisecond
_COUNTS = (*COUNTERS, *(f"eval_{name}" for name in EVAL_COUNTERS))
_LARGEST = ("worst_bucket", "longest_probe", "evicts", "admits", "shares")

Numbers = dict[str, float]
"""The numbers of one table over an interval: of one slice of it, of several, or of the slices of several ranks."""


class IndexHealth:
    """Reads one index, of a table or of a slice of one, and remembers what it had counted the last time."""

    def __init__(self, index: HashIndex) -> None:
        self.index = index
        self._bucket_rows = [len(index.policy.rows_of(bucket)) for bucket in index.policy.own_buckets]
        self._before, self._adopted = (0,) * len(_COUNTS), index.adopted
        self._counted = self._before  # between the last two calls of end_interval, by _COUNTS
        self._taken = [0] * len(self._bucket_rows)  # of each bucket, at the last of these calls
        self._longest_probe, self._next_group = 0, 0  # in the windows that were read; 0 before the first
        self.end_interval()

    @property
    def is_allocated(self) -> bool:
        """False on the meta device, where there is nothing to read."""
        return not self._buffer("counts").is_meta

    def _buffer(self, name: str) -> Tensor:
        return buffers_named(name, (self.index,))[0]

    def end_interval(self) -> None:
        """Begin the next interval. The one that ends began with the last call, or with a load since then.

        Raises:
            CheckpointError: the state that was last loaded is not complete, or not valid.
        """
        if not self.is_allocated:
            return
        index = self.index
        if not index.is_as_noted():
            index.notice_changes()  # torch.distributed.checkpoint loads in place
        if index.adopted.times != self._adopted.times:  # what was counted before the load is of a state that is gone
            self._adopted = index.adopted
            self._before = (*index.adopted.counts, *(0,) * len(EVAL_COUNTERS))
            self._longest_probe, self._next_group = 0, 0
        now = (*self._buffer("counts").tolist(), *index.fold_eval_counts().tolist())
        counted = tuple(new - old for new, old in zip(now, self._before, strict=True))
        self._counted = counted if min(counted) >= 0 else (0,) * len(counted)  # someone has written to the counts
        self._before, self._taken = now, self._buffer("bucket_taken").tolist()

    def probe(self, everything: bool = False) -> bool:
        """Read all groups of slots, or the next window of them; returns whether it was the last one."""
        if everything:
            self._longest_probe, self._next_group = self.index.longest_probe(), 0
            return True
        slot_groups, side_row = self._buffer("slot_groups"), self._buffer("side_row")
        begin, end = self._next_group, min(self._next_group + _WINDOW, slot_groups.size(0))
        self._longest_probe = max(self._longest_probe, longest_probe(slot_groups, side_row, begin, end))
        self._next_group = end % slot_groups.size(0)
        return self._next_group == 0

    def numbers(self) -> Numbers:
        """What the interval that has ended shows; nothing on meta."""
        if not self.is_allocated:
            return {}
        config, rows = self.index.config, self._bucket_rows
        return dict(zip(_COUNTS, self._counted, strict=True)) | {
            "taken": sum(self._taken),
            "rows": sum(rows),
            "worst_bucket": max((taken / of for taken, of in zip(self._taken, rows, strict=True) if of), default=0.0),
            "longest_probe": self._longest_probe,
            "evicts": config.evicts,
            "admits": config.admits,
            "shares": config.on_full == "share",
        }


def joined(parts: Sequence[Numbers]) -> Numbers:
    """Several slices, or ranks, together: what cannot be added up is joined by its maximum."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: max(numbers) if name in _LARGEST else sum(numbers)
        for name in names
        for numbers in ([part[name] for part in parts if name in part],)
    }


def scalars_of(numbers: Numbers) -> dict[str, float]:
    """The numbers that are shown, NaN where there is none yet; see ``Monitor.scalars``."""
    if not numbers.get("rows"):
        return {}
    seen, inserted, unseen = (numbers[name] for name in ("ids_seen", "inserted", "unseen_answers"))
    rates = {
        "insert_rate": (True, inserted, seen),
        "evict_rate": (numbers["evicts"], numbers["evicted"], seen),
        "admit_rate": (numbers["admits"], inserted, inserted + unseen),
        "unseen_rate": (numbers["admits"], unseen, seen),
        "shared_rate": (numbers["shares"], numbers["shared_answers"], seen),
        "eval_unseen_rate": (True, numbers["eval_unseen_answers"], numbers["eval_ids_seen"]),
    }
    return {
        "occupancy": numbers["taken"] / numbers["rows"],
        "worst_bucket": numbers["worst_bucket"],
        "longest_probe": float(numbers["longest_probe"] or nan),
        **{name: part / of if of else nan for name, (is_counted, part, of) in rates.items() if is_counted},
    }
