"""The backward of table-batched lookups in ATen, table by table, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recfx.kernels.lookup.per_sample_weights_reference import per_sample_weight_gradients
from recfx.lowering.registry import LookupSpec
from recfx.lowering.step.trained_batch import TrainedBatch, gradients_of_table


class AtenBackward:
    """The backward of one lookup.

    Args:
        spec: the lookup. Its weights are not kept.
    """

    def __init__(self, spec: LookupSpec) -> None:
        self._tables, self._optimizers, self._pooling = spec.tables, spec.optimizers, spec.combine
        self._table_of_feature = [table for table, each in enumerate(spec.tables) for _ in each.feature_names]

    def scale_gradient(self, batch: TrainedBatch, grad_output: torch.Tensor) -> torch.Tensor:
        """See ``Backward``."""
        tables = [weight.detach() for weight in batch.weights]
        return per_sample_weight_gradients(batch.values, batch.offsets, grad_output, tables, self._table_of_feature)

    def weight_gradients(
        self, batch: TrainedBatch, grad_output: torch.Tensor, wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """See ``Backward``."""
        totals = [
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if want else None
            for weight, want in zip(batch.weights, wanted, strict=True)
        ]
        for table, total in enumerate(totals):
            if total is not None:
                total.index_add_(0, *gradients_of_table(batch, grad_output, self._tables, self._pooling, table))
        return totals

    def step(self, batch: TrainedBatch, grad_output: torch.Tensor) -> None:
        """See ``Backward``."""
        for table, weight in enumerate(batch.weights):
            if not weight.requires_grad:
                continue
            self._optimizers[table].prepare(weight)
            of_table = gradients_of_table(batch, grad_output, self._tables, self._pooling, table)
            self._optimizers[table].step(weight.data, *of_table)  # not an edit that autograd should see
