"""FBGEMM's backward on the CPU.

Gradients for ``weight.grad`` come from the same kernel as the fused SGD step: a step from zero with learning rate -1 is
the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import fbgemm_gpu  # noqa: F401  (loads the operators)
import torch

from recfx.lowering.fbgemm.layout import Layout, Part, distances
from recfx.lowering.fbgemm.rules import FLOAT32
from recfx.lowering.fbgemm.step import FusedStep
from recfx.lowering.step.trained_batch import TrainedBatch


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

    def weight_gradients(
        self, batch: TrainedBatch, grad_output: torch.Tensor, wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """See ``Backward``. If some tables are not wanted, there is one call per table."""
        totals = [
            torch.zeros(weight.shape, dtype=torch.float32, device="cpu") if want else None
            for weight, want in zip(batch.weights, wanted, strict=True)
        ]
        if all(wanted):
            base = torch.empty(1, dtype=torch.float32, device="cpu")
            part = self._layout.whole
            addresses = tuple(total.data_ptr() for total in totals if total is not None)
            self._add(part, batch, grad_output, base, distances(base, addresses, part.table_of_feature))
            return totals
        for table, total in enumerate(totals):
            if total is not None:
                part = self._layout.part(table)
                self._add(part, batch, grad_output, total.view(-1), part.at_start)
        return totals

    def _add(
        self, part: Part, batch: TrainedBatch, grad_output: torch.Tensor, base: torch.Tensor, offsets: torch.Tensor
    ) -> None:
        """Add the gradients of the tables of ``part`` at ``offsets`` from ``base``."""
        first, last = part.features
        batch_size = grad_output.shape[0]
        torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu(
            grad_output,
            base,
            part.placements,
            offsets,
            part.dim_offsets,
            part.max_dim,
            part.row_offsets,
            part.row_bits,
            batch.values,
            batch.offsets[first * batch_size : last * batch_size + 1],
            self._layout.pooling,
            batch.scale,
            False,
            torch.tensor(-1.0, dtype=torch.float32, device="cpu"),
            FLOAT32,
        )
