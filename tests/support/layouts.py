"""The ways in which a tensor can lie in memory, apart from being contiguous."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor

from tests.builders.collections import sequence_table, table
from tests.sharding.cases import values_of

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


KEYS = ["a", "b"]


def standard(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "sequence":
        return EmbeddingCollection([sequence_table("t", ["a"]), sequence_table("u", ["b"])])
    return EmbeddingBagCollection([table("t", ["a"]), table("u", ["b"])], is_weighted=kind == "weighted")


def batch_of_two(seed: int = 1) -> KeyedJaggedTensor:
    """Two ids in every bag, so that equal lengths fit them."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (16,), generator=draw)
    return KeyedJaggedTensor(KEYS, ids, torch.rand(16, generator=draw), torch.full((8,), 2))


def trained(collection: Any, features: KeyedJaggedTensor, layout: Any) -> list[Tensor]:
    """What two steps leave: outputs, weights and gradients."""
    outputs = []
    for _ in range(2):
        out = values_of(collection(features))
        out.backward(layout(torch.linspace(-1, 1, out.numel()).view(out.shape)))
        outputs.append(out.detach())
    gradients = [weight.grad for weight in collection.parameters() if weight.grad is not None]
    return [*outputs, *(weight.detach() for weight in collection.parameters()), *gradients]
