"""The fused step of weights that several lookups read, or several tables of one, in one call of the C++ operator.

Each feature of each lookup becomes a feature of one batch, with the gradients of its own columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from recfx.lowering.step.cpu_backward import CpuBackward
from recfx.lowering.step.trained_batch import TrainedBatch


def step_shared(parts: Sequence[tuple[Any, tuple[int, ...]]]) -> bool:
    """See ``GradientPart.step_shared``. The parts are those of ``TrainableLookup``, of any target."""
    backwards = [part.trainable.backward for part, _ in parts]
    weights = {id(part.weights[table]): part.weights[table] for part, tables in parts for table in tables}
    if (
        not all(isinstance(backward, CpuBackward) for backward in backwards)
        or len({backward.rule for backward in backwards}) > 1
        or len({weight.dtype for weight in weights.values()}) > 1
    ):
        return False
    number_of = {key: number for number, key in enumerate(weights)}
    names, optimizers = [""] * len(weights), [None] * len(weights)
    for (part, tables), backward in zip(reversed(parts), reversed(backwards), strict=True):  # the first one is kept
        for table in reversed(tables):
            number = number_of[id(part.weights[table])]
            names[number], optimizers[number] = backward.tables[table], part.optimizers[table]
    features = [feature for part, tables in parts for feature in _features(part, tables)]
    table_of_feature = [number_of[id(feature.weight)] for feature in features]
    samples = max(feature.samples for feature in features)
    with_scale = any(feature.has_scale for feature in features)
    gradients = torch.cat([feature.gradients(samples) for feature in features], dim=1)
    lengths = torch.cat([pad(feature.offsets.diff(), (0, samples - feature.samples)) for feature in features])
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    values = torch.cat([feature.rows for feature in features])
    scale = torch.cat([feature.scale() for feature in features]) if with_scale else None
    batch = TrainedBatch(list(weights.values()), values, offsets, scale)
    layout = (table_of_feature, list(map(id, optimizers)))
    if backwards[0].shared is None or backwards[0].shared[0] != layout:  # it keeps the optimizers alive
        backwards[0].shared = layout, CpuBackward(names, optimizers, table_of_feature, mean=False)
    backwards[0].shared[1].step(batch, gradients)
    return True


def _features(part: Any, tables: tuple[int, ...]) -> Iterator[_Feature]:
    column = 0
    for feature, table in enumerate(part.trainable.backward.table_of_feature):
        dim = part.weights[table].shape[1]
        if table in tables:
            yield _Feature(part, feature, table, slice(column, column + dim))
        column += dim


class _Feature:
    """One feature of one lookup in one backward.

    Args:
        part: what the backward left.
        feature: its number in the lookup.
        table: the table that it reads.
        columns: of the lookup's output.
    """

    def __init__(self, part: Any, feature: int, table: int, columns: slice) -> None:
        batch: TrainedBatch = part.batch
        self.weight: torch.Tensor = part.weights[table]
        self.samples: int = part.grad_output.shape[0]
        self.offsets = batch.offsets[feature * self.samples : (feature + 1) * self.samples + 1]
        self._ids = slice(int(self.offsets[0]), int(self.offsets[-1]))
        self.rows = batch.values[self._ids]
        self._gradients, self._scale = part.grad_output[:, columns], batch.scale
        self._mean: bool = part.trainable.backward.mean
        self.has_scale = self._mean or self._scale is not None

    def gradients(self, samples: int) -> torch.Tensor:
        """``[samples, dim]``, with zeros for samples that this batch has not."""
        return pad(self._gradients, (0, 0, 0, samples - self.samples))

    def scale(self) -> torch.Tensor:
        """What multiplies the gradient of each id: its weight, or the share of its bag's mean."""
        if self._scale is not None:
            return self._scale[self._ids]
        if not self._mean:
            return torch.ones(self.rows.numel(), dtype=torch.float32, device="cpu")
        lengths = self.offsets.diff()
        return torch.repeat_interleave(lengths.float().reciprocal(), lengths)
