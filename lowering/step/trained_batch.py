"""Batches whose backward is to come, by feature and by table, and several of one lookup as one."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from recfx.ir.node_kinds import NOT_COMBINED
from recfx.ir.tables import TableSpec
from recfx.kernels.lookup.embedding_bag import row_gradients


@dataclass(frozen=True)
class TrainedBatch:
    """One batch."""

    weights: list[torch.Tensor]  # the tables' ``[rows, dim]`` tensors
    values: torch.Tensor  # ``[n]`` int64 rows, all of them in range; -1 if an id gets no gradient
    offsets: torch.Tensor  # ``[F * B + 1]`` int64; ``B`` is 1 if rows are not combined
    scale: torch.Tensor | None  # ``[n]`` float32 per-sample weights
    lengths: tuple[int, ...] = ()  # how many ids each feature has, if rows are not combined; else empty

    def batch_size(self, features: int) -> int:
        """``B``, of a lookup of so many features."""
        return (self.offsets.numel() - 1) // features


Gradients = tuple[torch.Tensor | None, ...]
"""Gradients of a lookup's outputs, float32; contiguous if rows are pooled. If not, None is for keys that the loss does
not depend on: their ids are left out. The only output of any other lookup has a gradient."""


def joined(
    batches: list[TrainedBatch], gradients: list[Gradients], features: int, pooling: str
) -> tuple[TrainedBatch, Gradients]:
    """One batch with the samples of all batches of the same lookup, one batch after the other; and its gradients."""
    if len(batches) == 1:
        return batches[0], gradients[0]
    if pooling == NOT_COMBINED:
        return joined_by_key(batches, gradients)
    lengths = [batch.offsets.diff().view(features, -1) for batch in batches]
    sizes = [of_batch.sum(dim=1).tolist() for of_batch in lengths]
    offsets = batches[0].offsets.new_zeros(sum(of_batch.numel() for of_batch in lengths) + 1)
    torch.cumsum(torch.cat(lengths, dim=1).view(-1), 0, out=offsets[1:])

    def by_feature(tensors: list[torch.Tensor]) -> torch.Tensor:
        pieces = [tensor.split(size) for tensor, size in zip(tensors, sizes, strict=True)]
        return torch.cat([piece[feature] for feature in range(features) for piece in pieces])

    scales = [batch.scale for batch in batches if batch.scale is not None]
    values = by_feature([batch.values for batch in batches])
    together = TrainedBatch(batches[0].weights, values, offsets, by_feature(scales) if scales else None)
    return together, (torch.cat([gradient for (gradient,) in gradients if gradient is not None]),)


def joined_by_key(batches: list[TrainedBatch], gradients: list[Gradients]) -> tuple[TrainedBatch, Gradients]:
    """``joined`` for rows that are not combined. Ids of keys without a gradient are not in it."""
    by_key = [batch.values.split(batch.lengths) for batch in batches]
    values: list[torch.Tensor] = []
    of_keys: list[torch.Tensor | None] = []
    for key in range(len(gradients[0])):
        pairs = [
            (rows[key], own) for rows, given in zip(by_key, gradients, strict=True) if (own := given[key]) is not None
        ]
        values += [torch.cat([rows for rows, _ in pairs]) if pairs else batches[0].values[:0]]
        of_keys.append(torch.cat([own for _, own in pairs]) if pairs else None)
    lengths = tuple(rows.numel() for rows in values)
    borders = torch.tensor([0, *accumulate(lengths)], device=batches[0].offsets.device)
    return TrainedBatch(batches[0].weights, torch.cat(values), borders, None, lengths), tuple(of_keys)


def reached(table_of_feature: Sequence[int], gradients: Gradients, tables: int) -> list[bool]:
    """Which tables get a gradient."""
    if len(gradients) == 1 and gradients[0] is not None:
        return [True] * tables
    has_gradient = {table for table, gradient in zip(table_of_feature, gradients, strict=True) if gradient is not None}
    return [table in has_gradient for table in range(tables)]


@dataclass(frozen=True)
class FeatureBags:
    """One feature's share of a batch: ``rows [n]``, ``offsets [B + 1]``, and the range of its ids in the batch."""

    table: int
    rows: torch.Tensor
    offsets: torch.Tensor
    begin: int
    end: int

    def of_ids(self, scale: torch.Tensor | None) -> torch.Tensor | None:
        return None if scale is None else scale[self.begin : self.end]


def feature_bags(
    tables: Sequence[TableSpec], values: torch.Tensor, offsets: torch.Tensor, batch_size: int
) -> Iterator[FeatureBags]:
    """The bags of each feature of a lookup."""
    of_features = [position for position, table in enumerate(tables) for _ in table.feature_names]
    if offsets.is_meta:  # lengths are not known, and shapes do not depend on them
        borders = [0] + [values.numel()] * len(of_features)
    else:
        borders = offsets[::batch_size].tolist() if batch_size else [0] * (len(of_features) + 1)
    for feature, table in enumerate(of_features):
        begin, end = (0, values.numel()) if offsets.is_meta else (borders[feature], borders[feature + 1])
        first = feature * batch_size
        yield FeatureBags(table, values[begin:end], offsets[first : first + batch_size + 1] - begin, begin, end)


def gradients_by_table(
    batch: TrainedBatch, gradients: Gradients, tables: Sequence[TableSpec], combine: str, chosen: Collection[int]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """The rows that each chosen table's bags read, int64 ``[n]``, and their gradients, float32 ``[n, dim]``.

    ``batch``, ``gradients`` and ``tables`` are those of the whole lookup. Absent ids, and tables that no gradient
    reaches, are left out.
    """
    dims = [table.embedding_dim for table in tables for _ in table.feature_names]
    bags = feature_bags(tables, batch.values, batch.offsets, batch.batch_size(len(dims)))
    if combine != NOT_COMBINED:
        (gradient,) = gradients
        gradients = (None,) * len(dims) if gradient is None else gradient.split(dims, dim=1)
    parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for bag, gradient in zip(bags, gradients, strict=True):
        if gradient is not None and bag.table in chosen:
            _, by_row = row_gradients(gradient, bag.rows, bag.offsets, combine, bag.of_ids(batch.scale))
            is_present = bag.rows >= 0
            parts.setdefault(bag.table, []).append((bag.rows[is_present], by_row[is_present]))
    return {table: tuple(map(torch.cat, zip(*of_table, strict=True))) for table, of_table in parts.items()}  # type: ignore[misc]
