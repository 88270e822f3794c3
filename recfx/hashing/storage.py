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
from recfx.kernels.hash_index import IndexBuffers

COUNTERS = ("ids_seen", "inserted", "shared_answers", "unseen_answers")
_fresh_number = itertools.count(1)


class IndexStorage(nn.Module):
    """The tensors of one index as buffers: moving, copying, saving and loading them.

    Args:
        config: of the index.
        name: of the table, for messages.
        device: ``"meta"`` (also as torch's default device) allocates nothing; any other means the CPU.
    """

    slots: Tensor
    side_row: Tensor
    row_ids: Tensor
    row_state: Tensor
    free_rows: Tensor
    bucket_taken: Tensor
    counts: Tensor

    def __init__(self, config: ResolvedHashConfig, name: str, device: torch.device | str | None) -> None:
        super().__init__()
        self.config = config
        self.name = name
        default_device = torch.empty(0).device
        on_meta = (default_device if device is None else torch.device(device)).type == "meta"
        buffers = state.allocate(config, "meta") if on_meta else state.empty_buffers(config)
        for key, tensor in buffers._asdict().items():
            self.register_buffer(key, tensor, persistent=key in (state.ROW_IDS, state.ROW_STATE))
        self.register_buffer("counts", _zero_counts(buffers.slots.device), persistent=False)

    def index_buffers(self) -> IndexBuffers:
        """The tensors as the operators in ``recfx.kernels.hash_index`` take them: views, not copies."""
        return IndexBuffers(self.slots, self.side_row, self.row_ids, self.row_state, self.free_rows, self.bucket_taken)

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
                self._replace(state.allocate(self.config, "meta"))
        elif was_meta:
            self._replace(state.empty_buffers(self.config))
        elif not torch.equal(result.to("cpu", torch.int64), probe.to("cpu")):  # to_empty()
            self.reset()
        elif result.device.type == "cpu" and result.is_shared():
            for tensor in self._buffers.values():
                if tensor is not None:
                    tensor.share_memory_()
        return self

    def reset(self) -> None:
        """Forget all ids and all counts."""
        self._fill(state.empty_buffers(self.config))
        self.counts.zero_()

    def _replace(self, buffers: IndexBuffers) -> None:
        for key, tensor in buffers._asdict().items():
            self._buffers[key] = tensor
        self._buffers["counts"] = _zero_counts(buffers.slots.device)

    def _fill(self, buffers: IndexBuffers) -> None:
        # In place: other modules may share these tensors.
        for old, new in zip(self.index_buffers(), buffers, strict=True):
            old.copy_(new)

    def __setstate__(self, saved: dict[str, Any]) -> None:
        super().__setstate__(saved)
        for key, tensor in self._buffers.items():  # torch.load(map_location=...) may have moved them
            if tensor is not None and not tensor.is_meta:
                self._buffers[key] = tensor.cpu()

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

        A state without any index is that of a plain table: it makes this index empty.
        """
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        keys = (prefix + state.ROW_IDS, prefix + state.ROW_STATE)
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in keys)
        buffers = state.buffers_from_state(self.config, self.name, *(state_dict.get(key) for key in keys))
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


def _zero_counts(device: torch.device) -> Tensor:
    return torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
