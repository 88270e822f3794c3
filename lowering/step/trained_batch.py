"""One batch, in the form that table-batched backward kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recfx.ir.tables import TableSpec
from recfx.kernels.lookup.embedding_bag import row_gradients


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


def gradients_of_table(
    batch: TrainedBatch, grad_output: torch.Tensor, tables: Sequence[TableSpec], pooling: str, table: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that one table's bags read, int64 ``[n]``, and their gradients, float32 ``[n, dim]``.

    Args:
        batch: of the whole lookup.
        grad_output: ``[B, sum D]``, of the whole lookup.
        tables: those of the lookup.
        pooling: ``"SUM"`` or ``"MEAN"``.
        table: the position of one of them.
    """
    described, batch_size = tables[table], grad_output.shape[0]
    feature = sum(len(each.feature_names) for each in tables[:table])
    column = sum(len(each.feature_names) * each.embedding_dim for each in tables[:table])
    rows, gradients = [], []
    for _ in described.feature_names:
        offsets = batch.offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        ids = slice(int(offsets[0]), int(offsets[-1]))
        gradient = grad_output[:, column : column + described.embedding_dim]
        scale = None if batch.scale is None else batch.scale[ids]
        by_row = row_gradients(gradient, batch.values[ids], offsets - offsets[0], pooling, scale)[1]
        is_present = batch.values[ids] >= 0
        rows.append(batch.values[ids][is_present])
        gradients.append(by_row[is_present])
        feature, column = feature + 1, column + described.embedding_dim
    return torch.cat(rows), torch.cat(gradients)
