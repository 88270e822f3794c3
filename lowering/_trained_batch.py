"""One batch, in the form that table-batched backward kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TrainedBatch:
    """One batch.

    Args:
        weights: the tables' ``[rows, dim]`` tensors.
        values: ``[n]`` int64 rows, all of them in range; -1 if an id gets no gradient.
        offsets: ``[F * B + 1]`` int64.
        scale: ``[n]`` float32 per-sample weights, or None.
    """

    weights: list[torch.Tensor]
    values: torch.Tensor
    offsets: torch.Tensor
    scale: torch.Tensor | None


def joined(batches: list[TrainedBatch], features: int) -> TrainedBatch:
    """One batch that has the samples of all batches, one batch after the other.

    Args:
        batches: of the same lookup.
        features: ``F``.
    """
    if len(batches) == 1:
        return batches[0]
    lengths = [batch.offsets.diff().view(features, -1) for batch in batches]
    sizes = [each.sum(dim=1).tolist() for each in lengths]
    offsets = batches[0].offsets.new_zeros(sum(each.numel() for each in lengths) + 1)
    torch.cumsum(torch.cat(lengths, dim=1).view(-1), 0, out=offsets[1:])

    def by_feature(tensors: list[torch.Tensor]) -> torch.Tensor:
        pieces = [tensor.split(size) for tensor, size in zip(tensors, sizes, strict=True)]
        return torch.cat([piece[feature] for feature in range(features) for piece in pieces])

    scales = [batch.scale for batch in batches if batch.scale is not None]
    values = by_feature([batch.values for batch in batches])
    return TrainedBatch(batches[0].weights, values, offsets, by_feature(scales) if scales else None)
