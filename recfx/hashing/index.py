"""``HashIndex``: from raw 64-bit ids to the rows of one table."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recfx.errors import GROW, ConversionError, IdTypeError, InputError, TableFullError
from recfx.errors.argument_types import typed
from recfx.hashing.config import HashConfig, ResolvedHashConfig, checked_arguments
from recfx.hashing.storage import EVAL_COUNTERS, IndexStorage, watched
from recfx.kernels.build import forks
from recfx.kernels.index import buckets, hash_index
from recfx.kernels.index.hash_index import InFlight
from recfx.kernels.index.index_buffers import BATCHES, COUNTERS, TAKEN, IndexView, is_taken
from recfx.kernels.index.slot_groups import longest_probe

_DEFAULT_CONFIG = HashConfig()


class Occupancy(NamedTuple):
    """How full an index is, not counting dense rows. If there are no buckets, ``worst_bucket`` is -1."""

    taken: int
    rows: int
    worst_bucket: int
    worst_bucket_taken: int
    worst_bucket_rows: int


class Inserted(NamedTuple):
    """What ``HashIndex.insert`` returns.

    Args:
        rows: int64 ``[n]``, the row of each id; -1 for an id that is not admitted and reads zeros.
        new_rows: int64, the rows in the order in which they were given out; their ids are ``row_ids[new_rows]``.
        evicted_ids: int64, the ids in the order in which they lost their rows, those that expired first.
    """

    rows: Tensor
    new_rows: Tensor
    evicted_ids: Tensor


class HashIndex(IndexStorage):
    """Gives rows of a table to raw 64-bit ids. Any int64 is a valid id.

    Ids are int64 or int32 ``[n]`` on any device, and rows are int64 ``[n]`` on the same device. The index itself always
    lives on the CPU: ``.to()`` and ``.half()`` do not affect it. On the meta device it holds nothing (``len`` is 0,
    ``items`` is empty), and asking it for rows is an error unless the ids are on meta as well; ``to_empty`` turns it
    into an empty index.

    Invalid ids raise ``IdTypeError`` (``wrong_id_dtype``) or ``InputError`` (``wrong_id_shape``, ``wrong_id_layout``,
    ``index_on_meta``) in every method, and then change nothing.

    The ``state_dict`` holds the following; everything else is rebuilt from it. ``row_ids`` int64 ``[rows]`` (-1 if
    free); ``row_state`` uint8 ``[rows]`` (0 never used, 1 taken, 2 free but used before; in a collection also 3 and 5:
    taken, from 0 or from any other state, with weights that are still to be initialised); ``counts`` int64 ``[6]`` (see
    ``counters``); ``slice_counts`` int64 ``[parts, 5]`` (zeros, or what slices of a table that is sharded by rows have
    counted besides); ``identity`` int64 ``[3]`` (of table, seed and dense_rows); with ``on_full="evict"``,
    ``row_scores`` int64 ``[rows]``; with ``admit_after > 1``, ``candidate_ids`` int64, ``candidate_counts`` int32 and
    ``candidate_order`` int64, each ``[rows]``.

    An index may hold a slice of its table's rows, as it does on each rank if a table is sharded by rows. Its tensors
    are then as long as the slice, and all rows that it takes or returns are relative to the slice: a table's row minus
    ``row_begin``. It gives the slice's ids the same rows as an index of the whole table would. ``find`` returns -1 for
    ids of other slices.

    Threads: any number of threads may call ``find``, ``answer``, ``find_or_insert``, ``insert`` and ``erase``. Readers
    may run at the same time, a writer runs alone, and no reader sees half a batch. Nothing else (``items``,
    ``state_dict``, loading, copying, ``occupancy``) may run at the same time as a writer.

    Example:
        >>> index = recfx.HashIndex(100)
        >>> index.find_or_insert(torch.tensor([-5, 2**62, -5]))
        tensor([0, 1, 0])
        >>> index.find(torch.tensor([2**62, 7]))
        tensor([ 1, -1])

    Args:
        rows: the number of rows of the table.
        config: the table's config, in which ``dense_rows=None`` stands for 0 here; or its resolved form.
        name: the name of the table, for messages.
        device: only ``"meta"`` (also as torch's default device) makes a difference.
        row_begin, row_end: the rows of the table that the index holds, at least one; by default all. Each border must
            be among the dense rows or at the border of a bucket.

    Raises:
        ConversionError: ``invalid_hash_config`` (one cause: all rows are dense, so there is nothing to index),
            ``no_memory_for_rows``.
    """

    @typed(ConversionError)
    def __init__(
        self,
        rows: int,
        *,
        config: HashConfig | ResolvedHashConfig = _DEFAULT_CONFIG,
        name: str = "table",
        device: torch.device | str | None = None,
        row_begin: int = 0,
        row_end: int | None = None,
    ) -> None:
        resolved, policy = checked_arguments(rows, config, name, row_begin, row_end)
        super().__init__(resolved, policy, name, device)

    # Finding and inserting

    def find(self, ids: Tensor) -> Tensor:
        """The row of each id, -1 if it has none. Changes and counts nothing.

        Example:
            >>> index = recfx.HashIndex(100)
            >>> index.find(torch.tensor([7]))
            tensor([-1])
        """
        self._check_ids(ids)
        if ids.is_meta:
            return torch.empty_like(ids, dtype=torch.int64)
        cpu_ids, buffers, policy = ids.to("cpu", torch.int64), self.index_buffers(), self.policy
        groups, side_row, lock = buffers.slot_groups, buffers.side_row, buffers.lock
        rows = hash_index.find(cpu_ids, groups, side_row, policy.own_dense_rows, lock, policy.row_begin)
        return rows.to(ids.device)

    def find_or_insert(self, ids: Tensor) -> Tensor:
        """The row of each id; new ids get one. Equals ``insert(ids).rows``.

        Example:
            >>> index = recfx.HashIndex(100)
            >>> index.find_or_insert(torch.tensor([7, 9, 7]))
            tensor([0, 1, 0])
        """
        return self.insert(ids).rows

    def insert(self, ids: Tensor) -> Inserted:
        """Insert one training batch: returns the row of each id, and which rows are new.

        New ids get rows in order of first appearance, each the lowest free row of its bucket. If the bucket is full,
        ``config.on_full`` decides. With ``config.admit_after > 1``, an id gets a row after that many sightings; until
        then it reads the ``unseen`` answer.

        Example:
            >>> index = recfx.HashIndex(2, config=recfx.HashConfig(on_full="evict"))
            >>> rows = index.find_or_insert(torch.tensor([7, 9]))
            >>> index.insert(torch.tensor([9, 11]))
            Inserted(rows=tensor([1, 0]), new_rows=tensor([0]), evicted_ids=tensor([7]))

        Raises:
            TableFullError: ``table_full``, with ``on_full="error"``, or with ``"evict"`` if this batch uses all rows of
                the bucket. The index is unchanged, except that ids have expired.
            InputError: ``foreign_id``: an id belongs to another slice of the table. The index is unchanged.
        """
        self._check_ids(ids)
        if ids.is_meta:
            nothing = ids.new_empty(0, dtype=torch.int64)
            return Inserted(torch.empty_like(ids, dtype=torch.int64), nothing, nothing)
        cpu_ids = ids.to("cpu", torch.int64)
        if not self.policy.is_whole_table and (foreign := cpu_ids[~self.holds(cpu_ids)]).numel() > 0:
            raise InputError(
                f"Id {int(foreign[0])} does not belong to rows {self._rows_held} of the table.",
                reason="foreign_id",
                module_path=self.name,
                what_to_do="give each slice of the table only its own ids: HashIndex.holds tells which these are.",
            )
        buffers = self.index_buffers()
        self.removals += 1  # before anything is removed: Ctrl-C may come right after
        inserted = hash_index.find_or_insert(
            cpu_ids, [0], [ids.numel()], [buffers], [self.policy], [InFlight.nothing()]
        )
        self.written()
        evicted = torch.cat([inserted.expired_ids, inserted.ids_before[inserted.states_before == TAKEN]])
        self.removals -= evicted.numel() == 0
        full_bucket = int(inserted.report[0, 1])
        if full_bucket >= 0:
            raise self.full_error(full_bucket)
        self.refresh()  # new rows get their weights now, so as not to overwrite those that the caller writes next
        rows = (
            torch.where(inserted.rows < -1, -inserted.rows - 2, inserted.rows) if self.config.admits else inserted.rows
        )
        return Inserted(rows.to(ids.device), inserted.new_rows.to(ids.device), evicted.to(ids.device))

    def answer(self, ids: Tensor) -> Tensor:
        """What eval mode reads: the row of each id, or the ``config.unseen`` answer if it has none. Inserts nothing.

        Example:
            >>> index = recfx.HashIndex(100)
            >>> index.answer(torch.tensor([7]))
            tensor([-1])

        Returns:
            int64 ``[n]``; for an id without a row, -1 with ``unseen="zeros"``, and a row of its bucket with
            ``"share"`` and ``"row"``.
        """
        rows = self.find(ids)
        if ids.is_meta:
            return rows
        absent = rows < 0
        if self.config.unseen != "zeros":
            rows = torch.where(absent, self.shared_rows(ids.to(torch.int64)), rows)
        if torch.compiler.is_compiling():  # a value that depends on the ids would break the graph
            self.eval_counts[0] += ids.numel()
            self.eval_counts[1] += absent.sum().to("cpu")
        else:
            hash_index.add_counts([self.eval_counts], [ids.numel(), int(absent.sum())])
        return rows

    def erase(self, ids: Tensor) -> Tensor:
        """Forget these ids and free their rows. Ids without a row and dense ids are left alone.

        Do not call it between a batch's forward and its backward: the backward then raises an error, because its
        gradients might train rows that belong to other ids by then.

        Example:
            >>> index = recfx.HashIndex(100)
            >>> rows = index.find_or_insert(torch.tensor([7, 9]))
            >>> index.erase(torch.tensor([9, 11]))
            tensor([ 1, -1])

        Returns:
            int64 ``[n]``: the row that each id had, -1 if it had none or appears earlier in ``ids``.
        """
        self._check_ids(ids)
        if ids.is_meta:
            return torch.empty_like(ids, dtype=torch.int64)
        buffers = self.index_buffers()
        self.removals += 1  # before anything is removed: Ctrl-C may come right after
        rows = hash_index.erase(ids.to("cpu", torch.int64), buffers, self.policy)
        self.written()
        self.number_state()
        self.removals -= not bool((rows >= 0).any())
        return rows.to(ids.device)

    def shared_rows(self, ids: Tensor) -> Tensor:
        """The row that each id (int64 ``[n]``) shares if it has none of its own: one of its bucket, chosen by its hash,
        or the last one, with ``unseen="row"``.

        For an id of another slice of the table it is -1.

        Example:
            >>> index = recfx.HashIndex(100, config=recfx.HashConfig(unseen="row"))
            >>> index.shared_rows(torch.tensor([7, 9]))
            tensor([99, 99])
        """
        config = self.config
        rows = buckets.shared_rows(
            ids, config.rows, config.dense_rows, config.share_buckets or config.buckets, config.seed
        )
        if self.policy.is_whole_table:
            return rows
        return torch.where(self.holds(ids), rows - self.policy.row_begin, -1)

    def holds(self, ids: Tensor) -> Tensor:
        """Whether each id (int64 ``[n]``) belongs in this index, whether or not it has a row: bool ``[n]``.

        Example:
            >>> recfx.HashIndex(100).holds(torch.tensor([7]))
            tensor([True])
        """
        config = self.config
        home = buckets.home_rows(ids, config.rows, config.dense_rows, config.buckets, config.seed)
        return (home >= self.policy.row_begin) & (home < self.policy.row_end)

    # Contents

    def items(self) -> tuple[Tensor, Tensor]:
        """All ids and their rows, int64, on the CPU, sorted by row. Dense ids are not listed. Empty on meta.

        Example:
            >>> index = recfx.HashIndex(100)
            >>> rows = index.find_or_insert(torch.tensor([9, 7]))
            >>> index.items()
            (tensor([9, 7]), tensor([0, 1]))
        """
        if self.slot_groups.is_meta:
            return _no_ids(), _no_ids()
        buffers = self.index_buffers()
        rows = torch.nonzero(is_taken(buffers.row_state)).squeeze(1)
        return buffers.row_ids[rows], rows

    def __len__(self) -> int:
        return 0 if self.slot_groups.is_meta else int(self.index_buffers().bucket_taken.sum())

    def __bool__(self) -> bool:
        return True  # despite __len__: `if module:` must not skip an empty index

    @property
    def counters(self) -> dict[str, int]:
        """What has happened so far, in training and eval together.

        ``batches`` (in training, one for each table that shares the index), ``ids_seen`` (occurrences), ``inserted``
        (ids that got a row), ``evicted`` (ids that lost their row to another id, or because they expired),
        ``shared_answers`` (occurrences that trained a shared row because their bucket was full), ``unseen_answers``
        (occurrences without a row, in eval or before admission, which read the ``config.unseen`` answer). The counts of
        training are saved with the index.

        Example:
            >>> index = recfx.HashIndex(100)
            >>> rows = index.find_or_insert(torch.tensor([7, 7]))
            >>> index.counters["ids_seen"], index.counters["inserted"]
            (2, 1)
        """
        if self.slot_groups.is_meta:
            return dict.fromkeys(COUNTERS, 0)
        counters = dict(zip(COUNTERS, self.counts.tolist(), strict=True))
        for name, count in zip(EVAL_COUNTERS, self.fold_eval_counts().tolist(), strict=True):
            counters[name] += count
        return counters

    def candidates(self) -> tuple[Tensor, Tensor]:
        """The ids that have been seen but not admitted, int64, and their sightings, int64. On the CPU.

        Oldest first. Candidates that first appeared in the same batch are in no particular order across buckets.

        Example:
            >>> index = recfx.HashIndex(100, config=recfx.HashConfig(admit_after=3))
            >>> rows = index.find_or_insert(torch.tensor([7, 7]))
            >>> index.candidates()
            (tensor([7]), tensor([2]))
        """
        if self.slot_groups.is_meta:
            return _no_ids(), _no_ids()
        buffers = self.index_buffers()
        places = torch.nonzero(buffers.candidate_counts).squeeze(1)
        places = places[buffers.candidate_order[places].argsort()]
        return buffers.candidate_ids[places], buffers.candidate_counts[places].long()

    def longest_probe(self) -> int:
        """How many groups of slots (cache lines) the slowest ``find`` of an id reads; 0 for an empty index.

        Reads all groups.

        Example:
            >>> recfx.HashIndex(100).longest_probe()
            0
        """
        if self.slot_groups.is_meta:
            return 0
        buffers = self.index_buffers()
        return longest_probe(buffers.slot_groups, buffers.side_row)

    def occupancy(self) -> Occupancy:
        """Taken rows and all rows, of the index and of its fullest bucket (the first one, if several are tied).

        Example:
            >>> index = recfx.HashIndex(100)
            >>> rows = index.find_or_insert(torch.tensor([7, 9]))
            >>> index.occupancy()
            Occupancy(taken=2, rows=100, worst_bucket=0, worst_bucket_taken=2, worst_bucket_rows=100)
        """
        buckets_taken = self.index_buffers().bucket_taken
        counts = [0] * len(buckets_taken) if buckets_taken.is_meta else buckets_taken.tolist()
        taken = dict(zip(self.policy.own_buckets, counts, strict=True))
        if not taken:
            return Occupancy(0, 0, -1, 0, 0)
        rows = {bucket: len(self.policy.rows_of(bucket)) for bucket in taken}
        worst = max(taken, key=lambda bucket: taken[bucket] / rows[bucket])
        return Occupancy(sum(taken.values()), self.policy.own_index_rows, worst, taken[worst], rows[worst])

    def extra_repr(self) -> str:
        whole = f"{HashConfig(**vars(self.config))}, name={self.name!r}, ids={len(self)}"
        return whole if self.policy.is_whole_table else f"{whole}, rows {self._rows_held}"

    @property
    def _rows_held(self) -> str:
        return f"{self.policy.row_begin} to {self.policy.row_end}"

    # Checks and errors

    def _check_ids(self, ids: Tensor) -> None:
        """Check ids whose rows are asked for; errors as the class says."""
        argument: object = ids  # users do not always run a type checker
        error: type[IdTypeError | InputError] = InputError
        if not isinstance(argument, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            error, reason = IdTypeError, "wrong_id_dtype"
            actual = ids.dtype if isinstance(argument, Tensor) else type(argument).__name__
            message, what_to_do = f"Ids must be an int64 or int32 tensor, got {actual}.", "convert them to torch.int64."
        elif ids.layout != torch.strided:
            reason, message = "wrong_id_layout", f"Ids must be a dense tensor, got one of layout {ids.layout}."
            what_to_do = "pass the ids themselves: ids.values() of a sparse or a jagged tensor."
        elif ids.dim() != 1:
            reason, message = "wrong_id_shape", f"Ids must be [n], got {list(ids.shape)}."
            what_to_do = "flatten them with .reshape(-1)."
        elif self.slot_groups.is_meta and not ids.is_meta:
            reason, message = "index_on_meta", "The index is on the meta device, where it holds no ids."
            what_to_do = "call to_empty(device='cpu') on the model first, and load its state if it has one."
        else:
            return
        raise error(message, reason=reason, module_path=self.name, what_to_do=what_to_do)

    def full_error(self, bucket: int) -> TableFullError:
        """The error that says which bucket is full, and what to do; it is noted for ``recfx.explain``.

        Example:
            >>> recfx.HashIndex(100).full_error(0).reason
            'table_full'
        """
        capacity = len(self.policy.rows_of(bucket))
        message = f"bucket {bucket} of {self.config.buckets} of table {self.name!r} is full: "
        if self.config.evicts:
            message += (
                f"all its {capacity} rows are in use by this batch, or by batches whose backward has not run yet, and "
                "none can be evicted."
            )
            advice = (
                "Give the table more rows (HashConfig.rows), or use smaller batches; or lower the batches_in_flight of "
                "its collection, if each backward runs sooner than that. Evaluate in eval mode or under torch.no_grad."
            )
        else:
            batches = int(self.buffers_as_they_are().counts[BATCHES])
            self.__dict__["full_at"] = (self.adopted.times, batches, bucket)
            part = "table" if self.policy.is_whole_table else "slice"
            free = capacity - int(self.bucket_taken[bucket - self.policy.own_buckets.start])
            message += (
                f"this batch has more new ids for it than the {free} of its {capacity} rows that are free "
                f"({len(self)} of the {part}'s {self.policy.own_index_rows} rows are taken)."
            )
            advice = f"Give the table more rows (HashConfig.rows), or set on_full='evict' or on_full='share'. {GROW}"
        return TableFullError(message, reason="table_full", module_path=self.name, what_to_do=advice)


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64, device="cpu")


def buffers_named(name: str, indexes: Sequence[HashIndex]) -> list[Tensor]:
    """The buffer of this name of each index; reading attributes of the modules would take ten times as long."""
    buffers: list[Any] = [index._buffers for index in indexes]
    return [tensors[name] for tensors in buffers]


def views_of(indexes: Sequence[HashIndex], training: bool) -> list[IndexView]:
    """``HashIndex.view`` of each index, in some models of thousands, at little cost per index.

    Raises:
        CheckpointError: as in ``HashIndex.refresh``.
    """
    if torch.compiler.is_compiling():
        return [index.view(training) for index in indexes]
    forks.use_one_thread_in_child()
    found: list[IndexView] = []
    for index in indexes:
        own: Any = index.__dict__
        ids, state, groups, side = watched(own["_buffers"])
        views: Any = own["_views"] if own["_leader"] is None and not own["_expects_load"] else None
        try:
            is_noted = own["_versions"] == (ids._version, state._version, groups._version, side._version)
        except RuntimeError:  # inference tensors have no versions
            is_noted = False
        fits = views is not None and is_noted and views[0].slot_groups is groups
        found.append(views[training] if fits else index.view(training))
    return found
