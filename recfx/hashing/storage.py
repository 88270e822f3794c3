"""Where an index keeps its tensors: on the CPU, whatever is done to the model around it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recfx.hashing import state
from recfx.hashing.config import ResolvedHashConfig
from recfx.hashing.identity import IDENTITY, identity
from recfx.kernels.index_buffers import TAKEN, IndexBuffers, IndexPolicy

EVAL_COUNTERS = ("ids_seen", "unseen_answers")
_fresh_number = itertools.count(1)


class IndexStorage(nn.Module):
    """The tensors of one index as buffers: moving, copying, saving and loading them.

    Args:
        config: of the table.
        policy: the same as the operators take it, with the slice of the table's rows that the index holds.
        name: of the table, for messages.
        device: ``"meta"`` (also as torch's default device) allocates nothing; any other means the CPU.
    """

    slots: Tensor
    side_row: Tensor
    row_ids: Tensor
    row_state: Tensor
    row_scores: Tensor
    bucket_taken: Tensor
    counts: Tensor
    lock: Tensor
    identity: Tensor
    eval_counts: Tensor

    def __init__(
        self, config: ResolvedHashConfig, policy: IndexPolicy, name: str, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.config = config
        self.name = name
        self.policy = policy
        default_device = torch.empty(0).device
        on_meta = (default_device if device is None else torch.device(device)).type == "meta"
        buffers = state.allocate(policy, "meta") if on_meta else state.empty_buffers(policy)
        saved = state.state_names(config)
        for key, tensor in buffers._asdict().items():
            self.register_buffer(key, tensor, persistent=key in saved)
        self.register_buffer(IDENTITY, identity(config, name).to(buffers.slots.device))
        self.register_buffer("eval_counts", self._zero_eval_counts(), persistent=False)
        # Not registered: they are modules of their own elsewhere.
        self.__dict__["_leader"], self.__dict__["_followers"] = None, []
        self._note_versions()

    def follow(self, leader: IndexStorage) -> None:
        """Be ``leader``'s copy: what is written into that one from outside comes here as well.

        Column shards of a table on one rank have an index each, of which one is saved.
        """
        self.__dict__["_leader"] = leader
        leader.__dict__["_followers"].append(self)

    def index_buffers(self) -> IndexBuffers:
        """The tensors as the operators in ``recfx.kernels.hash_index`` take them: views, not copies.

        Raises:
            CheckpointError: somebody has written into ``row_ids`` (torch.distributed.checkpoint loads in place), and
                what stands there now is no valid state.
        """
        self.refresh()
        buffers: Any = self._buffers
        return IndexBuffers(*(buffers[key] for key in IndexBuffers._fields))

    def refresh(self) -> None:
        """Notice a state that was written from outside: see ``index_buffers``."""
        if torch.compiler.is_compiling():
            return
        leader: IndexStorage | None = self.__dict__["_leader"]
        if leader is not None:
            leader.refresh()
        if self._versions != self._current_versions():
            self._adopt_written_state()

    def holds_ids(self) -> bool:
        """Whether any id has a row or is counted; also of a state that was written from outside, and wrong."""
        if self.slots.is_meta:
            return False
        candidate_counts: Any = self._buffers["candidate_counts"]
        return bool((self.row_state == TAKEN).any()) or bool(candidate_counts.any())

    def reset(self) -> None:
        """Forget all ids and all counts."""
        self._fill(state.empty_buffers(self.policy))

    def written(self) -> None:
        """The index's own operators have changed its state: what is derived from it is up to date."""
        self._note_versions()

    # Changes from outside

    def _current_versions(self) -> tuple[int, int]:
        row_ids, row_state = self._buffers["row_ids"], self._buffers["row_state"]
        if row_ids is None or row_state is None or row_ids.is_inference() or row_state.is_inference():
            return (0, 0)
        return row_ids._version, row_state._version

    def _note_versions(self) -> None:
        # The C++ operators do not count as writers here, every ATen operator does.
        if not torch.compiler.is_compiling():
            self._versions = self._current_versions()

    def _adopt_written_state(self) -> None:
        own = {key: self._buffers[key] for key in state.state_names(self.config)}
        buffers = state.buffers_from_state(self.config, self.policy, self.name, own)
        followers: list[IndexStorage] = self.__dict__["_followers"]
        for each in [self, *followers]:
            each._fill(buffers)

    def _warn_of_forgetting(self) -> None:
        warnings.warn(
            f"table {self.name!r}: the state has the table's weight, but no index, so the index forgets its "
            f"{int((self.row_state == TAKEN).sum())} ids. Load a state with the index's keys, or, if this is meant, "
            "call the index's reset() first. To keep the index, load with strict=False.",
            stacklevel=3,
        )

    # Moving and copying

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> IndexStorage:
        """Everything that moves or casts a module ends here. The index stays on the CPU; only meta is followed.

        What ``fn`` does is found out on a small tensor, so that the index itself is not copied for nothing.
        """
        was_meta = self.slots.is_meta
        # Numbers that no other call has used: memory that to_empty() happens to get cannot hold them.
        probe = torch.full((8,), next(_fresh_number), dtype=torch.int64, device=self.slots.device)
        result = fn(probe)
        if result.is_meta:
            if not was_meta:
                self._replace(state.allocate(self.policy, "meta"))
        elif was_meta:
            self._replace(state.empty_buffers(self.policy))
        elif not torch.equal(result.to("cpu", torch.int64), probe.to("cpu")):  # to_empty()
            self.reset()
        elif result.device.type == "cpu" and result.is_shared():
            for tensor in self._buffers.values():
                if tensor is not None:
                    tensor.share_memory_()
        return self

    def _replace(self, buffers: IndexBuffers) -> None:
        for key, tensor in buffers._asdict().items():
            self._buffers[key] = tensor
        self._buffers[IDENTITY] = identity(self.config, self.name).to(buffers.slots.device)
        self._buffers["eval_counts"] = self._zero_eval_counts()
        self._note_versions()

    def _fill(self, buffers: IndexBuffers) -> None:
        # In place: other modules may share these tensors.
        for key, tensor in buffers._asdict().items():
            if key != "lock":
                getattr(self, key).copy_(tensor)
        self.identity.copy_(identity(self.config, self.name))
        self.eval_counts.zero_()
        self._note_versions()

    def _zero_eval_counts(self) -> Tensor:
        return torch.zeros(len(EVAL_COUNTERS), dtype=torch.int64, device=self.slots.device)

    def __getstate__(self) -> dict[str, Any]:
        if not self.slots.is_meta:
            self.index_buffers()  # a state that was written from outside is checked before it goes on
        return {**self.__dict__, "_views": None}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        super().__setstate__(saved)
        self._buffers = dict(self._buffers)  # copy.copy shares the dict
        for key, tensor in self._buffers.items():  # torch.load(map_location=...) may have moved them
            if tensor is not None and not tensor.is_meta:
                self._buffers[key] = tensor.cpu()
        if not self.lock.is_meta and not self.lock.is_shared():
            # A new one: the original may be held, or is this very tensor (copy.copy), and somebody will let it go.
            self._buffers["lock"] = torch.zeros_like(self.lock)
        self._note_versions()

    # Saving and loading

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self.slots.is_meta:
            self.index_buffers()  # a state that was written from outside is checked before it goes on
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
        """Load, or raise a ``CheckpointError`` with this index as it was (torch passes what is raised on).

        A state without any index is that of a plain table: it makes this index empty, unless the collection around it
        says otherwise (``state.ABSENT``).
        """
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        saved = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        if_absent = saved.pop(state.ABSENT, None)
        unexpected_keys.extend(prefix + key for key in saved if key not in state.EVERY_NAME)
        if not state.has_index(saved):
            if if_absent == state.KEEP:
                missing_keys.extend(prefix + key for key in state.state_names(self.config))
                return
            if if_absent == state.FORGET and self.holds_ids():
                self._warn_of_forgetting()
        buffers = state.buffers_from_state(self.config, self.policy, self.name, saved)
        if not self.slots.is_meta:
            self._fill(buffers)
        elif local_metadata.get("assign_to_params_buffers", False):
            self._replace(buffers)
        else:
            warnings.warn(
                f"{prefix or self.name}: the index is on the meta device, so loading is a no-op. Did you mean to pass "
                "assign=True, or to call to_empty() first?",
                stacklevel=2,
            )
