"""FBGEMM's backward on the CPU.

Gradients for ``weight.grad`` come from the same kernel as the fused SGD step: a step from zero with learning rate -1 is
the gradient.
"""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  (loads the operators)
import torch

from recfx.lowering._fbgemm_layout import Layout, distances
from recfx.lowering._fbgemm_rules import FLOAT32
from recfx.lowering._fbgemm_step import FusedStep
from recfx.lowering._trained_batch import TrainedBatch


class FbgemmBackward:
    """The backward kernels of one lookup; caches what does not change from batch to batch.

    Args:
        layout: the lookup's tables and their optimizers.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._step = FusedStep(layout)

    def step(self, batch: TrainedBatch, grad_output: torch.Tensor) -> None:
        """See ``Backward``."""
        self._step.run(batch, grad_output)

    def scale_gradient(self, batch: TrainedBatch, grad_output: torch.Tensor) -> torch.Tensor:
        """See ``Backward``."""
        layout = self._layout
        gradient: torch.Tensor = torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
            grad_output,
            layout.base,
            layout.weight_offsets(batch.weights),
            layout.whole.dim_offsets,
            batch.values,
            batch.offsets,
            torch.ones(len(layout.whole.table_of_feature), dtype=torch.int32, device="cpu"),
        )
        return gradient

    def weight_gradients(self, batch: TrainedBatch, grad_output: torch.Tensor) -> list[torch.Tensor]:
        """See ``Backward``."""
        totals = [torch.zeros(weight.shape, dtype=torch.float32, device="cpu") for weight in batch.weights]
        base = torch.empty(1, dtype=torch.float32, device="cpu")
        addresses = tuple(total.data_ptr() for total in totals)
        part = self._layout.whole
        torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu(
            grad_output,
            base,
            part.placements,
            distances(base, addresses, part.table_of_feature),
            part.dim_offsets,
            part.max_dim,
            part.row_offsets,
            part.row_bits,
            batch.values,
            batch.offsets,
            self._layout.pooling,
            batch.scale,
            False,
            torch.tensor(-1.0, dtype=torch.float32, device="cpu"),
            FLOAT32,
        )
        return totals
