"""``jagged_dict``: puts rows that are not pooled into TorchRec's output type, in the standard key order."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.runtime.base import NodeModule

_own_node = torch.ops.aten._unsafe_view.default


class AssembleJaggedDict(NodeModule):
    """Give each key its rows, with the lengths of its feature.

    Args:
        keys: the keys of the output.
        parts: the keys whose rows each input has, in order.
        need_indices: whether the ids are put into the output as well.
        all_train: whether all parts get gradients as soon as any key gets one, because ranks wait for each other in
            the backwards of all of them.
    """

    def __init__(self, keys: list[str], parts: list[list[str]], need_indices: bool, all_train: bool = False) -> None:
        super().__init__()
        self.keys, self.parts, self.need_indices, self.all_train = keys, parts, need_indices, all_train

    def forward(
        self, *arguments: tuple[torch.Tensor, ...] | torch.Tensor | KeyedJaggedTensor
    ) -> dict[str, JaggedTensor]:
        """``arguments``: the parts, then the ids, with keys in the order of the output.

        A part is a tuple with ``[n, D]`` rows for each key, from a lookup; or one ``[n, D]`` tensor, key by key, if
        they have arrived from other ranks.

        Returns a ``JaggedTensor`` per key: ``[n, D]`` rows, a row per id; ids as weights if they are needed.
        """
        *parts, ids = arguments
        assert isinstance(ids, KeyedJaggedTensor)
        counts = dict(zip(self.keys, ids.length_per_key(), strict=True))
        # `to_dict` fails for a batch size of 0.
        lengths = dict(zip(self.keys, ids.lengths().split(ids.stride_per_key()), strict=True))
        of_key = dict(zip(self.keys, ids.values().split(list(counts.values())), strict=True))
        rows: dict[str, torch.Tensor] = {}
        for keys, part in zip(self.parts, parts, strict=True):
            pieces = part.split([counts[key] for key in keys]) if isinstance(part, torch.Tensor) else part
            rows.update(zip(keys, pieces, strict=True))
        if self.all_train and len(parts) > 1:
            rows = dict(zip(rows, _Together.apply(*rows.values()), strict=True))
        # A node of its own for each key: hooks of keys that the loss does not use are not called. It is not a view, and
        # may be changed in place.
        rows = {
            key: _own_node(tensor, tensor.shape) if tensor.requires_grad else tensor for key, tensor in rows.items()
        }
        return {
            key: JaggedTensor(rows[key], of_key[key] if self.need_indices else None, lengths[key]) for key in self.keys
        }


class _Together(torch.autograd.Function):
    """Hands its tensors on; if any of them gets a gradient, the others get zeros."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.view_as(part) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients
