"""``recfx.monitor``: how full the indexes of a model are and what happens in them, as scalars for TensorBoard.

Training is not slowed down: nothing is hooked into it, and the counters are there anyway. A call of ``scalars`` reads a
few numbers per table, and one window of the slots of one table: too few for ATen to wake other threads for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import nan
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from recfx.collections.converted_collection import ConvertedCollection, converted_collections
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.ranks_agree import on_all_ranks
from recfx.collections.sharding.shard import INDEXES_BEFORE_SHARDING
from recfx.collections.wrappers import users_path
from recfx.errors import ConversionError, RecfxError, plural, type_of
from recfx.errors.argument_types import typed
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


@typed(ConversionError)
def monitor(model: nn.Module) -> Monitor:
    """Watch the tables of a model that have an index.

    Make it from the model that is trained: after it was converted, sharded or copied, because these make other tables.
    Wrappers may come before or after, and so may checkpoints.

    Example:
        >>> model = recfx.convert(Model(), hashing=recfx.HashConfig.raw_ids())
        >>> watch = recfx.monitor(model)
        >>> output = model(batch)
        >>> watch.scalars()["ebc.embedding_bags.users/occupancy"]  # two of 100 rows
        0.02

    Args:
        model: a converted model, sharded or not, also inside DDP and torch.compile wrappers. It does not change.

    Raises:
        ConversionError: ``invalid_argument``; ``no_collection``: nothing in the model is converted; ``no_index``: no
            table has an index.
        CheckpointError: the state that was last loaded into a table is not complete, or not valid.
    """
    collections = converted_collections(model)
    if not collections:
        raise ConversionError(
            "there is no converted collection in the model.",
            reason="no_collection",
            what_to_do="pass the model that recfx.convert returned, or what shards or wraps it.",
        )
    tables: dict[str, list[_IndexHealth]] = {}
    seen: set[HashIndex] = set()
    for path, collection in collections.items():
        for table, indexes in _indexes(collection).items():
            if indexes and seen.issuperset(indexes):  # of a table of the same weight
                continue
            seen.update(indexes)
            tables[kind_of(collection).table_path(path, table)] = [_IndexHealth(index) for index in indexes]
    if not tables:
        raise ConversionError(
            "this model has no hashed table: ids are rows, and nothing is counted.",
            reason="no_index",
            what_to_do="convert with hashing=HashConfig.raw_ids() for raw ids, or do without a monitor.",
        )
    return Monitor({users_path(model, path): parts for path, parts in tables.items()})


class Monitor:
    """The scalars of a model's tables, each time for the interval since the last time. See :func:`monitor`.

    Example:
        >>> recfx.monitor(recfx.convert(Model(), hashing=recfx.HashConfig.raw_ids())).tables
        ('ebc.embedding_bags.users',)
    """

    def __init__(self, tables: dict[str, list[_IndexHealth]]) -> None:
        self._tables = tables
        self._turn = 0

    def __repr__(self) -> str:
        return f"Monitor({plural(len(self.tables), 'table')})"

    @property
    def tables(self) -> tuple[str, ...]:
        """The fully qualified names of all tables that have an index, also of those on other ranks.

        Example:
            >>> recfx.monitor(recfx.convert(Model(), hashing=recfx.HashConfig.raw_ids())).tables
            ('ebc.embedding_bags.users',)
        """
        return tuple(self._tables)

    def scalars(self, group: dist.ProcessGroup | None = None, *, probe_all: bool = False) -> dict[str, float]:
        """The scalars now, as ``{"<table>/occupancy": 0.61, ...}``.

        As it is now: ``occupancy`` is the share of the index's rows that are taken, and ``worst_bucket`` that of the
        fullest bucket, which is 1 when the table is full. ``longest_probe`` is how many groups of slots (cache lines)
        the slowest lookup reads, in what was read so far: each call reads a window of one table.

        Of the ids seen in training since the last call, or since a load, counting each occurrence:

        - ``insert_rate``: ids that got a row, per id seen.
        - ``evict_rate``: ids that lost their row to another id, or because they expired, per id seen; with
          ``on_full="evict"``.
        - ``admit_rate``: ids that got a row, per id that got one or was not admitted; with ``admit_after``.
        - ``unseen_rate``: share that had no row yet and read the ``unseen`` answer; with ``admit_after``.
        - ``shared_rate``: share that found its bucket full and trained a shared row; with ``on_full="share"``.

        Of the ids seen in eval mode since the last call, ``eval_unseen_rate`` is the share that had no row.

        The names are the same at every call. What is not known is NaN: a rate over no ids, and ``longest_probe`` before
        the first window of its table.

        Example:
            >>> model = recfx.convert(Model(), hashing=recfx.HashConfig.raw_ids())
            >>> watch = recfx.monitor(model)
            >>> output = model(batch)
            >>> [name.rpartition("/")[2] for name in watch.scalars()]
            ['occupancy', 'worst_bucket', 'longest_probe', 'insert_rate', 'eval_unseen_rate']

        Args:
            group: None: this rank's own rows; nothing is communicated, and tables that have no rows here are left out.
                A process group: all rows of all its ranks; each of them must call this at the same time, and gets the
                same numbers.
            probe_all: read all groups of all tables, which takes milliseconds per 100,000 rows.

        Raises:
            ConversionError: ``invalid_argument``: ``group`` is not a process group; ``monitor_before_sharding``.
            CheckpointError: the state that was last loaded into a table is not complete, or not valid.
        """
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ConversionError(
                f"group is {type_of(group)}, not a process group.",
                reason="invalid_argument",
                what_to_do="pass torch.distributed.group.WORLD, or None for this rank alone.",
            )
        read = partial(self._read, probe_all)
        if group is None:
            tables = read()
        else:  # an error of one rank is raised on all
            ranks = on_all_ranks(group, read, lambda error: error if isinstance(error, RecfxError) else None)
            tables = {name: _joined([of_rank[name] for of_rank in ranks]) for name in ranks[0]}
        return {
            f"{name}/{scalar}": value
            for name, numbers in tables.items()
            for scalar, value in _scalars_of(numbers).items()
        }

    def log(self, writer: Any, step: int, group: dist.ProcessGroup | None = None, *, probe_all: bool = False) -> None:
        """Write the scalars to TensorBoard, or to anything with ``add_scalar(tag, value, step)``.

        Example:
            >>> class Printer:
            ...     def add_scalar(self, tag, value, step):
            ...         if tag.endswith("/occupancy"):
            ...             print(tag, value, step)
            >>> model = recfx.convert(Model(), hashing=recfx.HashConfig.raw_ids())
            >>> recfx.monitor(model).log(Printer(), step=100)
            ebc.embedding_bags.users/occupancy 0.0 100

        Args:
            writer: a ``SummaryWriter``, say; None on ranks that take part in the sum but write nothing.
            step: the number of the step.
            group, probe_all: as for ``scalars``.
        """
        for name, value in self.scalars(group, probe_all=probe_all).items():
            if writer is not None:
                writer.add_scalar(name, value, step)

    def _read(self, probe_all: bool) -> dict[str, Numbers]:
        parts = [part for slices in self._tables.values() for part in slices]
        if any(part.index in INDEXES_BEFORE_SHARDING for part in parts):
            raise ConversionError(
                "the model was sharded after this monitor was made, and what is trained now is counted elsewhere.",
                reason="monitor_before_sharding",
                what_to_do="call recfx.monitor with the sharded model.",
            )
        for part in parts:
            part.end_interval()
        parts = [part for part in parts if part.is_allocated]
        if probe_all:
            for part in parts:
                part.probe(everything=True)
        elif parts and parts[self._turn % len(parts)].probe():  # its last window: the next call reads another table
            self._turn += 1
        return {name: _joined([part.numbers() for part in slices]) for name, slices in self._tables.items()}


def _indexes(collection: ConvertedCollection) -> dict[str, list[HashIndex]]:
    """The indexes of this rank, by name of the whole table; none for a table without rows here."""
    local = collection.sharding.local_of
    return {table: [collection.index(shard.name) for shard in local(table)] for table in collection.tables_with_index()}


class _IndexHealth:
    """Reads one index, of a table or of a slice of one, and remembers what it had counted the last time."""

    def __init__(self, index: HashIndex) -> None:
        self.index = index
        self._before, self._adopted = (0,) * len(_COUNTS), index.adopted
        self._counted = self._before  # between the last two calls of end_interval, by _COUNTS
        self._longest_probe, self._next_group = 0, 0  # in the windows that were read; 0 before the first
        self.end_interval()

    @property
    def is_allocated(self) -> bool:
        """False on the meta device, where there is nothing to read."""
        return not self._buffer("counts").is_meta

    def _buffer(self, name: str) -> Tensor:
        return buffers_named(name, (self.index,))[0]

    def end_interval(self) -> None:
        """Begin the next interval. The one that ends began with the last call, or with a load since then."""
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
        self._before, self._occupancy = now, index.occupancy()

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
        config, occupancy = self.index.config, self._occupancy
        return dict(zip(_COUNTS, self._counted, strict=True)) | {
            "taken": occupancy.taken,
            "rows": occupancy.rows,
            "worst_bucket": occupancy.worst_bucket_taken / max(occupancy.worst_bucket_rows, 1),
            "longest_probe": self._longest_probe,
            "evicts": config.evicts,
            "admits": config.admits,
            "shares": config.on_full == "share",
        }


def _joined(parts: Sequence[Numbers]) -> Numbers:
    """Several slices, or ranks, together: what cannot be added up is joined by its maximum."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: max(numbers) if name in _LARGEST else sum(numbers)
        for name in names
        for numbers in ([part[name] for part in parts if name in part],)
    }


def _scalars_of(numbers: Numbers) -> dict[str, float]:
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
