"""The tensors of an index, which stay on the CPU whatever is done to the model around it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recfx.errors import CheckpointError, few
from recfx.hashing import state
from recfx.hashing.config import ResolvedHashConfig
from recfx.hashing.identity import IDENTITY, identity
from recfx.hashing.slices import SLICE_COUNTS, STATISTICS, SliceCounts, parts_between
from recfx.kernels.build import forks
from recfx.kernels.index import hash_index
from recfx.kernels.index.index_buffers import (
    COUNTERS,
    EVICTED,
    FREED,
    INSERTED,
    NEVER_USED,
    IndexBuffers,
    IndexPolicy,
    IndexView,
    is_taken,
)
from recfx.kernels.index.slot_table import slot_count

_logger = logging.getLogger("recfx")

EVAL_COUNTERS = ("ids_seen", "unseen_answers")
# Whoever writes to these from outside has written a state, or has damaged what the operators follow without a check.
watched = operator.itemgetter("row_ids", "row_state", "slot_groups", "side_row")
_fresh_number = itertools.count(1)


class Adopted(NamedTuple):
    """The last state that took the place of an index's own: by a load, by ``reset``, or by a move from meta."""

    times: int  # how often that has happened
    counts: tuple[int, ...]  # what that state had counted in training, by ``COUNTERS``; those of eval mode begin at 0


class IndexStorage(nn.Module):
    """The tensors of one index as buffers: moving, copying, saving and loading them. ``policy`` is the form of
    ``config`` for the operators, with the slice of the table's rows that the index holds.
    """

    slot_groups: Tensor
    side_row: Tensor
    row_ids: Tensor
    row_state: Tensor
    row_scores: Tensor
    bucket_taken: Tensor
    counts: Tensor
    lock: Tensor
    uninitialized: Tensor
    identity: Tensor
    eval_counts: Tensor
    slice_counts: Tensor
    _leader: IndexStorage | None
    adopted: Adopted
    """Since when, and from which counts on, the index has counted without a break."""
    full_at: tuple[int, int, int] | None = None
    """When a batch last met a full bucket, which was an error: ``adopted.times``, batches of training, the bucket."""
    state_number: int
    """Changes whenever ``number_state`` is called; different in copies of the index."""

    def __init__(
        self, config: ResolvedHashConfig, policy: IndexPolicy, name: str, device: torch.device | str | None
    ) -> None:
        super().__init__()
        forks.use_one_thread_in_child()
        self.config = config
        self.name = name
        self.policy = policy
        default_device = torch.empty(0).device
        on_meta = (default_device if device is None else torch.device(device)).type == "meta"
        buffers = state.allocate(policy, "meta") if on_meta else state.empty_buffers(policy, name)
        saved = state.state_names(config)
        for key, tensor in buffers._asdict().items():
            self.register_buffer(key, tensor, persistent=key in saved)
        self.register_buffer(IDENTITY, identity(config, name).to(buffers.slot_groups.device))
        for key, tensor in self._zero_counts(buffers.slot_groups.device).items():
            self.register_buffer(key, tensor, persistent=key in saved)
        self.__dict__["_leader"] = None  # not a submodule, because it is part of the model elsewhere
        self._followers: list[IndexStorage] = []
        self._initializer: weakref.WeakMethod[Callable[[], None]] | None = None
        self._expects_load = False
        self._counts_elsewhere: set[Callable[[], None]] = set()
        self._sharded_counts: SliceCounts | None = None
        self._views: tuple[IndexView, IndexView] | None = None
        self.removals = 0  # how often ids have lost rows to erase() or insert(): see recfx/runtime/in_flight.py
        self.adopted = Adopted(0, (0,) * len(COUNTERS))
        self.number_state()
        self.written()

    def follow(self, leader: IndexStorage) -> None:
        """Become a copy of ``leader``, of another column shard, which alone is saved and loaded from outside."""
        self.__dict__["_leader"] = leader
        leader._followers.append(self)

    def expect_load(self) -> None:
        """Announce a load of the table's weights, followed by this index; until then the index cannot be read."""
        self._expects_load = True

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """A context in which the index can be read even if it expects a load, by the code that is about to load it."""
        before, self._expects_load = self._expects_load, False
        try:
            yield
        finally:
            self._expects_load = before

    def initialized_by(self, initialize_left: Callable[[], None]) -> None:
        """From now on, mark new rows; the method ``initialize_left``, which gives them their weights and removes the
        marks, is called before the state of the index is next read. Copies of the index do not have it.
        """
        self.policy = self.policy._replace(mark_new=1)
        self._initializer = weakref.WeakMethod(initialize_left)

    @property
    def has_uninitialized_rows(self) -> bool:
        cell = self._buffers["uninitialized"]
        return cell is not None and not cell.is_meta and bool(cell.item())

    def buffers_of(self, saved: Mapping[str, object]) -> IndexBuffers:
        """What the index would have after loading ``saved`` (by buffer name): see ``state.buffers_from_state``."""
        return state.buffers_from_state(self.policy, self.name, saved)

    def index_buffers(self) -> IndexBuffers:
        """The tensors as the operators in ``recfx.kernels.index.hash_index`` take them, after ``refresh``."""
        self.refresh()
        return self.buffers_as_they_are()

    def buffers_as_they_are(self) -> IndexBuffers:
        """``index_buffers`` without the check for outside writes and for new rows that are not initialised."""
        buffers: Any = self._buffers
        return IndexBuffers(*(buffers[key] for key in IndexBuffers._fields))

    def refresh(self) -> None:
        """Notice a state that was written from outside, as torch.distributed.checkpoint loads in place, and rows that
        are not initialised yet.

        Raises:
            CheckpointError: ``load_interrupted``, or the error for the invalid state that was written.
        """
        self.notice_changes()
        if not torch.compiler.is_compiling():
            self._initialize_left()

    def notice_changes(self) -> None:
        """``refresh`` for callers that have just seen to it that all rows are initialised."""
        if torch.compiler.is_compiling():
            return
        forks.use_one_thread_in_child()
        if self._expects_load:
            raise CheckpointError(
                "load_state_dict was interrupted: the rows may be those of the saved state, but the index is not.",
                reason="load_interrupted",
                module_path=self.name,
                what_to_do="load the state again; or call reset_parameters() on the collection to start again.",
            )
        if self._notice_written_state():
            self._initialize_left()

    def _initialize_left(self) -> None:
        if self.has_uninitialized_rows and self._initializer is not None:
            initialize_left = self._initializer()
            if initialize_left is not None:
                initialize_left()

    def is_as_noted(self) -> bool:
        """Whether ``notice_changes`` would find nothing."""
        return not self._expects_load and self._leader is None and self._versions == self._current_versions()

    def _notice_written_state(self) -> bool:
        """Take over a state that was written from outside; returns whether there was one."""
        has_changed = self._leader is not None and self._leader._notice_written_state()
        if self._versions == self._current_versions():
            return has_changed
        own = {key: self._buffers[key] for key in state.state_names(self.config)}
        if self._sharded_counts is not None:
            own.update(self._sharded_counts.loaded())
        self.take_state(self.buffers_of(own), self._followers)
        return True

    def holds_ids(self) -> bool:
        """Whether any id has a row or is counted, even in an invalid state that was written from outside."""
        if self.slot_groups.is_meta:
            return False
        candidate_counts: Any = self._buffers["candidate_counts"]
        return bool(is_taken(self.row_state).any()) or bool(candidate_counts.any())

    # What readers take

    def view(self, training: bool = False) -> IndexView:
        """What a lookup that finds rows itself needs, when all rows are initialised: in training, ids without a row get
        one afterwards, so meanwhile they do not share one.
        """
        self.notice_changes()
        slot_groups, views = self._buffers["slot_groups"], self._views
        if views is None or views[0].slot_groups is not slot_groups:
            config = self.config
            answering = IndexView(
                self.slot_groups, self.side_row, config.dense_rows, config.share_buckets, config.seed, self.lock,
                config.rows, self.policy.row_begin,
            )  # fmt: skip
            views = self._views = (answering, answering._replace(share_buckets=0))
        return views[training]

    def slot_table(self) -> tuple[Tensor, Tensor]:
        """The form of an index that is only read: the slot table int64 ``[slots, 2]`` of (id, row), which
        ``fbgemm::pruned_hashmap_lookup`` can read, and the row of id -1, int64 ``[1]``: new tensors.
        """
        buffers, slots = self.index_buffers(), self.slot_count
        made = torch.empty(slots, 2, dtype=torch.int64, device="cpu"), torch.empty(1, dtype=torch.int64, device="cpu")
        hash_index.slot_tables_(*made, [slots], [buffers.row_ids], [buffers.row_state], [buffers.lock])
        return made

    @property
    def slot_count(self) -> int:
        return slot_count(self.policy.own_index_rows)

    # Copies elsewhere

    @property
    def map_version(self) -> tuple[int, int, int]:
        """Equal as long as every id has the row that it had; different in copies of the index. Read it before the rows:
        a change that is under way shows afterwards. What other processes do in shared memory does not show.
        """
        # Whatever gives a row to an id or takes it away counts it, apart from erasing, which numbers the state.
        counts = self.counts.tolist()
        return self.state_number, self.removals, counts[INSERTED] + counts[EVICTED]

    @property
    def is_shared(self) -> bool:
        """Whether other processes may write to the index (``share_memory``)."""
        return not self.slot_groups.is_meta and self.slot_groups.is_shared()

    def mark_used(self) -> None:
        """Record that free rows hold old weights, which an ``init_fn`` must replace before ids get these rows."""
        free = self.row_state[self.policy.own_dense_rows :]
        free[free == NEVER_USED] = FREED
        self.written()

    def number_state(self) -> None:
        """Record, after the fact, that ids have lost their rows, or that another state has taken the place of this."""
        self.state_number = next(_fresh_number)

    def counted_elsewhere(self, fold: Callable[[], None]) -> None:
        """Counts of eval mode are somewhere else, on a device, say: ``fold``, which adds them, is called once when they
        are asked for.
        """
        self._counts_elsewhere.add(fold)

    def fold_eval_counts(self) -> Tensor:
        """``eval_counts``, with what is still counted elsewhere; this waits for the devices that count."""
        while self._counts_elsewhere:
            self._counts_elsewhere.pop()()
        return self.eval_counts

    def counts_to_save(self, first: SliceCounts | None = None) -> SliceCounts:
        """What a slice has counted, as its table's state has it (``SliceCounts``); what is loaded there is noticed."""
        if self._sharded_counts is None:
            self._sharded_counts = SliceCounts(self.config, self.policy.row_begin, self.policy.row_end)
        self._sharded_counts.take(self.counts, first)
        return self._sharded_counts

    def reset(self) -> None:
        self.take_state(state.empty_buffers(self.policy, self.name))

    # Changes from outside

    def _current_versions(self) -> tuple[int, ...]:
        buffers: Any = self._buffers
        try:
            ids, rows, groups, side = watched(buffers)
            return ids._version, rows._version, groups._version, side._version
        except RuntimeError:  # inference tensors have no versions
            return ()

    def written(self) -> None:
        """Record that the index's own operators changed its state, so everything derived from it is up to date."""
        # ATen operators increment the version of a tensor that they write; the C++ operators do not.
        if not torch.compiler.is_compiling():
            self._versions = self._current_versions()

    # Moving and copying

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> IndexStorage:
        """All moves and casts of a module end here. The index stays on the CPU; it only follows moves to and from meta,
        and into shared memory. A small tensor shows what ``fn`` does.
        """
        was_meta = self.slot_groups.is_meta
        # A number that no other call has used, so that the memory which to_empty() gets cannot contain it by chance.
        probe = torch.full((8,), next(_fresh_number), dtype=torch.int64, device=self.slot_groups.device)
        result = fn(probe)
        if result.is_meta:
            if not was_meta:
                self._replace(state.allocate(self.policy, "meta"))
        elif was_meta:
            self._replace(state.empty_buffers(self.policy, self.name))
        elif not torch.equal(result.to("cpu", torch.int64), probe.to("cpu")):  # to_empty()
            self.reset()
        elif result.device.type == "cpu" and result.is_shared():
            for tensor in self._buffers.values():
                if tensor is not None:
                    tensor.share_memory_()
        return self

    def _replace(self, buffers: IndexBuffers) -> None:
        device = buffers.slot_groups.device
        own = {IDENTITY: identity(self.config, self.name).to(device), **self._zero_counts(device)}
        self.fold_eval_counts()  # lest they be added to the new counts
        self._buffers.update({**buffers._asdict(), **own})  # in one step, which nothing can interrupt
        self._note_adopted()

    def take_state(self, buffers: IndexBuffers, followers: Sequence[IndexStorage] = ()) -> None:
        """Take over the state of another index of the same rows of the same table; counts of eval mode begin at 0."""
        # In place, because other modules may share these tensors; in one operator, so that Ctrl-C cannot leave it half
        # done.
        own = {IDENTITY: identity(self.config, self.name), **self._zero_counts(self.slot_groups.device)}
        sources = {key: tensor for key, tensor in {**buffers._asdict(), **own}.items() if key != "lock"}
        indexes = [self, *followers]
        targets = [getattr(index, key) for index in indexes for key in sources]
        for index in indexes:
            index.fold_eval_counts()  # lest they be added to the new counts
            index.number_state()  # before and after: whoever copies meanwhile has neither state
        torch._foreach_copy_(targets, [*sources.values()] * len(indexes))
        for index in indexes:
            index._note_adopted()

    def _note_adopted(self) -> None:
        """Note that another state has taken the place of the index's own."""
        self.number_state()
        if self._sharded_counts is not None:
            self._sharded_counts.note()
        counts = (0,) * len(COUNTERS) if self.counts.is_meta else tuple(self.counts.tolist())
        self.adopted = Adopted(self.adopted.times + 1, counts)
        self._expects_load = False
        self.written()

    def _zero_counts(self, device: torch.device) -> dict[str, Tensor]:
        """The counts that do not belong to ``IndexBuffers``."""
        parts = len(parts_between(self.config, self.policy.row_begin, self.policy.row_end))
        sizes = {"eval_counts": (len(EVAL_COUNTERS),), SLICE_COUNTS: (parts, len(STATISTICS))}
        return {key: torch.zeros(size, dtype=torch.int64, device=device) for key, size in sizes.items()}

    def __getstate__(self) -> dict[str, Any]:
        if not self.slot_groups.is_meta and not torch.compiler.is_compiling():
            self._notice_written_state()  # a written state is checked before it is copied
            self.fold_eval_counts()
        # Rows that are not initialised stay that way: the weights may have been copied already.
        own: dict[str, Any] = dict.fromkeys(("_views", "_initializer", "_sharded_counts"))
        return {**self.__dict__, **own, "_counts_elsewhere": set()}

    def __deepcopy__(self, memo: dict[int, Any]) -> IndexStorage:
        duplicate = memo[id(self)] = type(self).__new__(type(self))
        saved = self.__getstate__()
        # Models have thousands of indexes, and deepcopy would take its time to ask who shares the memory of a buffer.
        memo.update({id(buffer): buffer.clone() for buffer in self._buffers.values() if buffer is not None})
        memo[id(self._buffers)] = {key: memo.get(id(buffer)) for key, buffer in self._buffers.items()}
        memo.update({id(frozen): frozen for frozen in (self.config, self.policy, self.adopted)})
        duplicate.__setstate__({key: copy.deepcopy(value, memo) for key, value in saved.items()})
        return duplicate

    def __setstate__(self, saved: dict[str, Any]) -> None:
        super().__setstate__(saved)
        self._buffers = dict(self._buffers)  # copy.copy shares the dict
        for key, tensor in self._buffers.items():  # torch.load(map_location=...) may have moved them
            if tensor is not None and not tensor.is_meta:
                self._buffers[key] = tensor.cpu()
        if not self.lock.is_meta and not self.lock.is_shared():
            # A new lock: the original may be held, or may even be this very tensor (copy.copy), and will then be
            # released.
            self._buffers["lock"] = torch.zeros_like(self.lock)
        self.number_state()
        self.written()

    # Saving and loading

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self.slot_groups.is_meta:
            self.index_buffers()  # a state that was written from outside is checked before it is saved
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load, or raise a ``CheckpointError`` that leaves this index unchanged. A state of a plain table makes it
        empty, unless the collection around it says otherwise (``state.ABSENT``).
        """
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        saved = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        if_absent = saved.pop(state.ABSENT, None)
        unexpected_keys.extend(prefix + key for key in saved if key not in state.EVERY_NAME)
        if not state.has_index(saved):
            if if_absent == state.KEEP:
                missing_keys.extend(prefix + key for key in state.state_names(self.config))
                self._expects_load = False
                return
            if if_absent == state.FORGET:
                say_what_is_lost([self])
        buffers = self.buffers_of(saved)
        if not self.slot_groups.is_meta:
            self.take_state(buffers)
        elif local_metadata.get("assign_to_params_buffers", False):
            self._replace(buffers)
        else:
            self._expects_load = False
            warnings.warn(
                f"{prefix or self.name}: the index is on the meta device, so loading is a no-op. Did you mean to pass "
                "assign=True, or to call to_empty() first?",
                stacklevel=2,
            )


def say_what_is_lost(indexes: Sequence[IndexStorage]) -> None:
    """Say once, before indexes load a state of plain tables, that they forget their ids, or that no id has its rows."""
    holding = {index.name: int(is_taken(index.row_state).sum()) for index in indexes if index.holds_ids()}
    if holding:
        warnings.warn(
            f"tables {few(list(holding), 12)}: the state has weights but no index, so {sum(holding.values()):,} ids "
            "are lost. Load a state with the index's keys, or, if this is intended, call the index's reset() first. "
            "With strict=False, the ids keep their rows, which get the weights of the other state: those of other ids, "
            "unless it has the same ids in the same rows, as averaged weights have.",
            stacklevel=2,
        )
    lost = dict.fromkeys(index.name for index in indexes if index.name not in holding and not index.config.dense_rows)
    if lost:
        _logger.warning(
            "tables %s: the state has weights but no index, and no id is a row number here: each id gets its row, with "
            "initial weights, when it is first seen, so the weights that were loaded are lost. To keep what a plain "
            "table has learned, convert it without raw_ids() or dense_rows=0, and with more rows if other ids are to "
            "come. Load a state with TorchRec's managed collisions before the conversion.",
            few(list(lost), 12),
        )
