"""Target ``fbgemm``: FBGEMM's table-batched CPU kernels, without its module.

FBGEMM's module owns one flat buffer; recfx leaves every table where it is, the same ``Parameter`` with its own storage.
The kernels take one base tensor and an element offset a table, so the offsets here are the distances between the
tables' addresses and that base. The autograd function holds the tables alive until its backward has run.

Gradients of ``weight.grad`` come from the same kernel as the fused SGD step: a step of -1 from zero is the gradient.
"""

from __future__ import annotations

from typing import Any

import fbgemm_gpu  # noqa: F401  (loads the operators)
import torch
from torch.autograd.function import once_differentiable

from recfx.lowering._fbgemm_layout import Layout, distances
from recfx.lowering._fbgemm_step import FLOAT32, FusedStep
from recfx.lowering.registry import Declined, LookupBatch, LookupKernel, LookupSpec

_FUSED = ("sgd", "adagrad", "rowwise_adagrad")
_SCALE = 5  # position of the per-sample weights among the arguments of the autograd function


def decline(spec: LookupSpec) -> Declined | None:
    """None for float32 and float16 tables on the CPU, without optimizer or with one that FBGEMM has there."""

    def refuse(reason: str, message: str) -> Declined:
        return Declined(by="fbgemm", reason=reason, message=message)

    dtypes = {weight.dtype for weight in spec.weights}
    devices = {weight.device.type for weight in spec.weights}
    if devices != {"cpu"}:
        return refuse("device", f"the tables are on {'/'.join(sorted(devices))}; this target is for the CPU.")
    if not dtypes <= {torch.float32, torch.float16} or len(dtypes) != 1:
        return refuse("dtype", f"FBGEMM's CPU kernels take float32 or float16 tables, not {dtypes}.")
    if any(not weight.is_contiguous() for weight in spec.weights):
        return refuse("not_contiguous", "a table's rows are not contiguous.")
    for optimizer in spec.optimizers:
        if optimizer is None:
            continue
        if optimizer.kind not in _FUSED:
            return refuse("optimizer", f"FBGEMM has no {optimizer.kind} on the CPU.")
        if optimizer.group.get("weight_decay", 0):
            return refuse("weight_decay", f"FBGEMM's CPU {optimizer.kind} has no weight decay like torch.optim's.")
    return None


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel, with its constant tensors made once."""
    layout = Layout(spec)
    step = FusedStep(layout)
    fused = spec.optimizers[0] is not None

    def lookup(weights: list[torch.Tensor], batch: LookupBatch) -> torch.Tensor:
        values, offsets = batch.values.to(torch.int64), batch.offsets.to(torch.int64)
        arguments: list[torch.Tensor | None] = []
        if torch.is_grad_enabled():
            if not fused:
                arguments = list(weights)
            elif any(weight.requires_grad for weight in weights):
                arguments = [torch.zeros(0, dtype=torch.float32, device="cpu", requires_grad=True)]
        output: torch.Tensor = _TableBatchedLookup.apply(
            layout, step, weights, values, offsets, batch.per_sample_weights, *arguments
        )
        return output

    return lookup


class _TableBatchedLookup(torch.autograd.Function):
    """FBGEMM's forward; its backward as gradients of ``weight.grad``, or as the fused optimizer's step."""

    @staticmethod
    def forward(
        ctx: Any,
        layout: Layout,
        step: FusedStep,
        weights: list[torch.Tensor],
        values: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        *arguments: torch.Tensor,
    ) -> torch.Tensor:
        part = layout.whole
        scale = _float_or_none(per_sample_weights)
        ctx.layout, ctx.step = layout, step
        ctx.weights, ctx.values, ctx.offsets = weights, values, offsets
        ctx.scale, ctx.scale_dtype = scale, None if per_sample_weights is None else per_sample_weights.dtype
        output: torch.Tensor = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            layout.base,
            layout.weight_offsets(weights),
            part.dim_offsets,
            part.total_dim,
            part.row_offsets,
            values,
            offsets,
            layout.pooling,
            scale,
            FLOAT32,
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layout: Layout = ctx.layout
        grad_output = grad_output.float().contiguous()
        scale_gradient = None
        if ctx.needs_input_grad[_SCALE]:  # reads the rows, so before they are updated
            scale_gradient = torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
                grad_output,
                layout.base,
                layout.weight_offsets(ctx.weights),
                layout.whole.dim_offsets,
                ctx.values,
                ctx.offsets,
                torch.ones(len(layout.whole.table_of_feature), dtype=torch.int32, device="cpu"),
            ).to(ctx.scale_dtype)
        if layout.optimizers[0] is None:
            gradients = _weight_gradients(ctx, layout, grad_output)
        else:
            ctx.step.run(ctx, grad_output)
            gradients = [None] * (len(ctx.needs_input_grad) - _SCALE - 1)
        return (*[None] * _SCALE, scale_gradient, *gradients)


def _weight_gradients(ctx: Any, layout: Layout, grad_output: torch.Tensor) -> list[torch.Tensor | None]:
    wanted = ctx.needs_input_grad[_SCALE + 1 :]
    if not any(wanted):
        return [None] * len(wanted)
    totals = [torch.zeros(weight.shape, dtype=torch.float32, device="cpu") for weight in ctx.weights]
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
        ctx.values,
        ctx.offsets,
        layout.pooling,
        ctx.scale,
        False,
        torch.tensor(-1.0, dtype=torch.float32, device="cpu"),
        FLOAT32,
    )
    return [
        total.to(weight.dtype) if want else None
        for total, weight, want in zip(totals, ctx.weights, wanted, strict=True)
    ]


def _float_or_none(per_sample_weights: torch.Tensor | None) -> torch.Tensor | None:
    """FBGEMM's kernels take an undefined tensor, None in Python, as "no weights"; an empty one they would read."""
    return None if per_sample_weights is None else per_sample_weights.detach().float()
