"""Ids in transit to a device for which FBGEMM has no operators, such as an NPU, put into order by torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.runtime.bags import from_zero, select_bags


class ArrivingIds(KJTAllToAllTensorsAwaitable):
    """Does what TorchRec's class does, but for the operators that torch_npu would run on the host.

    Args:
        sent: what this rank has sent, with one batch size.
        stride_per_rank: the batch size of each rank.
        arguments: those of TorchRec's class.
    """

    def __init__(self, *, sent: KeyedJaggedTensor, stride_per_rank: list[int], **arguments: Any) -> None:
        # Without batch sizes, TorchRec does not expand the order of features to one of bags, which is FBGEMM's part.
        super().__init__(input=sent, stride_per_rank=None, stagger=1, **arguments)
        self._stride_per_rank = stride_per_rank

    def _wait_impl(self) -> KeyedJaggedTensor:
        for awaitable in self._awaitables:
            awaitable.wait()
        lengths, values, *weights = self._output_tensors
        return in_order_of_features(self._keys, lengths, values, weights[0] if weights else None, self._stride_per_rank)


def in_order_of_features(
    keys: list[str],
    lengths: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None,
    stride_per_rank: list[int],
) -> KeyedJaggedTensor:
    """Reorder ids that came rank by rank; the host does not wait for the device.

    Args:
        keys: the ``F`` features.
        lengths: int64 ``[F * B]``, ordered by rank, feature and sample; ``B`` is the sum of ``stride_per_rank``.
        values: ``[n]``, in the same order.
        weights: ``[n]``, or None.
        stride_per_rank: the batch size of each rank.

    Returns:
        A KJT ordered by feature, rank and sample, with offsets.
    """
    features, batch = len(keys), sum(stride_per_rank)
    arrived = KeyedJaggedTensor(
        ["arrived"], values, weights, lengths=lengths, offsets=from_zero(lengths), stride=lengths.numel()
    )
    positions = torch.arange(features * batch, device=values.device)
    by_rank = positions.split([features * stride for stride in stride_per_rank])
    bags = torch.cat([each.view(features, -1) for each in by_rank if each.numel()] or [positions], dim=-1).view(-1)
    values, lengths, offsets, weights = select_bags(arrived, bags, weights, values.numel())
    return KeyedJaggedTensor(keys, values, weights, lengths=lengths, offsets=offsets, stride=batch)
