"""The ways in which a tensor can lie in memory, apart from being contiguous."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torchrec import KeyedJaggedTensor

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a column": lambda tensor: torch.stack([tensor, tensor.flip(0)], dim=-1)[..., 0],
    "a slice with a step": lambda tensor: tensor.repeat_interleave(3, dim=0)[::3] if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor[:1].expand_as(tensor),
    "behind another element": lambda tensor: torch.cat([tensor[:1], tensor])[1:],
    "negated": lambda tensor: torch._neg_view(-tensor),
}
"""Each makes a tensor of the same shape and dtype; that of ``expanded`` has the first value everywhere."""


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as every kernel reads it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def laid_out(
    features: KeyedJaggedTensor, part: str, layout: Callable[[torch.Tensor], torch.Tensor]
) -> KeyedJaggedTensor:
    """The batch with its ``"values"``, ``"lengths"``, ``"offsets"`` or ``"weights"`` laid out in another way."""
    tensors = {"values": features.values(), "weights": features.weights_or_none()}
    tensors |= {"offsets": features.offsets()} if part == "offsets" else {"lengths": features.lengths()}
    tensors[part] = layout(tensors[part])
    return KeyedJaggedTensor(features.keys(), **tensors)
