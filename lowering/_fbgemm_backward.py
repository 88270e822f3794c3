"""The autograd function of the targets ``cpu`` and ``fbgemm``: any forward, with FBGEMM's backward.

Gradients for ``weight.grad`` come from the same kernel as the fused SGD step: a step from zero with learning rate -1 is
the gradient. A fused step waits until the backward pass has reached every lookup of the table.
The function keeps the tables alive until its backward has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import fbgemm_gpu  # noqa: F401  (loads the operators)
import torch
from torch.autograd.function import once_differentiable

from recfx.kernels.embedding_bag import row_gradients
from recfx.lowering._fbgemm_layout import POOLING, Layout, distances
from recfx.lowering._fbgemm_rules import FLOAT32
from recfx.lowering._fbgemm_step import FusedStep, TrainedBatch
from recfx.lowering._step_once import StepOnce, Triggers, leaf_gradients, leave_for_step, leaves


class LookedUp(NamedTuple):
    """What a forward returns: ``pooled``, float32 ``[B, sum D]``, and the rows that it read."""

    pooled: torch.Tensor
    rows: torch.Tensor  # [n] int64, -1 if an id gets no gradient
    has_absent: bool = False  # whether some may be -1


Forward = Callable[[torch.Tensor | None], LookedUp]
_SCALE = 5  # position of the per-sample weights in the arguments of the autograd function


class TrainableLookup:
    """Makes a forward trainable, and caches what does not change from batch to batch.

    Args:
        layout: the lookup's tables and their optimizers.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._step, self._once = FusedStep(layout), StepOnce()

    def __call__(
        self,
        weights: list[torch.Tensor],
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        forward: Forward,
    ) -> torch.Tensor:
        """Returns what ``forward`` pools: float32 ``[B, sum D]``, differentiable.

        Args:
            weights: the tables' ``[rows, dim]`` tensors.
            offsets: ``[F * B + 1]`` int64.
            per_sample_weights: ``[n]``, or None; they receive gradients.
            forward: called once, without autograd, with the per-sample weights as float32.
        """
        arguments: list[torch.Tensor] = []
        triggers: Triggers = []
        if torch.is_grad_enabled():
            if self.layout.optimizers[0] is None:
                arguments = list(weights)
            elif any(weight.requires_grad for weight in weights):
                triggers = self._once.triggers(weights)
                arguments = leaves(triggers)
        output: torch.Tensor = _TableBatchedLookup.apply(
            self.layout, (self._step, self._once, triggers), weights, offsets, forward, per_sample_weights, *arguments
        )
        return output


class _Part:
    """What one backward contributes to a fused step."""

    def __init__(self, step: FusedStep, lookup: StepOnce, batch: TrainedBatch, grad_output: torch.Tensor) -> None:
        self.step, self.lookup, self.batch, self.grad_output = step, lookup, batch, grad_output
        self.weights: list[torch.Tensor] = batch.weights
        self.optimizers: Sequence[Any] = step.optimizers

    def of_table(self, table: int) -> tuple[torch.Tensor, torch.Tensor]:
        layout, batch = self.step.layout, self.batch
        described, part = layout.tables[table], layout.part(table)
        batch_size = self.grad_output.shape[0]
        pooling = next(name for name, number in POOLING.items() if number == layout.pooling)
        rows, gradients = [], []
        for position, feature in enumerate(range(*part.features)):
            offsets = batch.offsets[feature * batch_size : (feature + 1) * batch_size + 1]
            ids = slice(int(offsets[0]), int(offsets[-1]))
            begin = int(part.dim_offsets[position])
            gradient = self.grad_output[:, begin : begin + described.embedding_dim]
            scale = None if batch.scale is None else batch.scale[ids]
            rows.append(batch.values[ids])
            gradients.append(row_gradients(gradient, batch.values[ids], offsets - offsets[0], pooling, scale)[1])
        return torch.cat(rows), torch.cat(gradients)

    def step_with(self, parts: Sequence[_Part]) -> None:
        self.step.run_once([part.batch for part in parts], [part.grad_output for part in parts])


class _TableBatchedLookup(torch.autograd.Function):
    """Its backward returns gradients for ``weight.grad``, or runs the fused optimizer's step."""

    @staticmethod
    def forward(
        ctx: Any,
        layout: Layout,
        step: tuple[FusedStep, StepOnce, Triggers],
        weights: list[torch.Tensor],
        offsets: torch.Tensor,
        forward: Forward,
        per_sample_weights: torch.Tensor | None,
        *arguments: torch.Tensor,
    ) -> torch.Tensor:
        # FBGEMM's kernels take an undefined tensor (None in Python) for "no weights", but would read an empty one.
        ctx.set_materialize_grads(False)
        scale = None if per_sample_weights is None else per_sample_weights.detach().float()
        looked_up = forward(scale)
        ctx.layout, ctx.step, ctx.kept = layout, step, []
        ctx.batch, ctx.has_absent = TrainedBatch(weights, looked_up.rows, offsets, scale), looked_up.has_absent
        ctx.scale_dtype = None if per_sample_weights is None else per_sample_weights.dtype
        return looked_up.pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        layout: Layout = ctx.layout
        step, once, triggers = ctx.step
        if grad_output is None:  # there is no gradient; zeros instead would cause a step
            weights = [None] * (len(ctx.needs_input_grad) - _SCALE - 1)
            return (*[None] * _SCALE, None, *(leaf_gradients(triggers) or weights))
        batch, present = _present(ctx.batch) if ctx.has_absent else (ctx.batch, None)
        grad_output = grad_output.float().contiguous()
        scale_gradient = None
        if ctx.needs_input_grad[_SCALE]:  # this reads the rows, so it comes before they are updated
            scale_gradient = _scale_gradient(batch, layout, grad_output)
            if present is not None:
                scale_gradient = scale_gradient.new_zeros(present.shape).masked_scatter_(present, scale_gradient)
            scale_gradient = scale_gradient.to(ctx.scale_dtype)
        if layout.optimizers[0] is None:
            gradients = _weight_gradients(batch, layout, grad_output, ctx.needs_input_grad[_SCALE + 1 :])
        else:
            leave_for_step(triggers, ctx.kept, _Part(step, once, batch, grad_output))
            gradients = list(leaf_gradients(triggers))
        return (*[None] * _SCALE, scale_gradient, *gradients)


def _present(batch: TrainedBatch) -> tuple[TrainedBatch, torch.Tensor | None]:
    """The batch without the ids that read no row, and a mask of the ids that are left; None if all are."""
    present = batch.values >= 0
    if bool(present.all()):
        return batch, None
    before = torch.zeros(present.numel() + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(present, 0, out=before[1:])
    scale = None if batch.scale is None else batch.scale[present]
    return TrainedBatch(batch.weights, batch.values[present], before[batch.offsets], scale), present


def _scale_gradient(batch: TrainedBatch, layout: Layout, grad_output: torch.Tensor) -> torch.Tensor:
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


def _weight_gradients(
    batch: TrainedBatch, layout: Layout, grad_output: torch.Tensor, wanted: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    if not any(wanted):
        return [None] * len(wanted)
    totals = [torch.zeros(weight.shape, dtype=torch.float32, device="cpu") for weight in batch.weights]
    base = torch.empty(1, dtype=torch.float32, device="cpu")
    addresses = tuple(total.data_ptr() for total in totals)
    part = layout.whole
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
        layout.pooling,
        batch.scale,
        False,
        torch.tensor(-1.0, dtype=torch.float32, device="cpu"),
        FLOAT32,
    )
    return [
        total.to(weight.dtype) if want else None
        for total, weight, want in zip(totals, batch.weights, wanted, strict=True)
    ]
