"""Target ``fbgemm``: FBGEMM's table-batched CPU kernels, without its module.

FBGEMM's module owns one flat buffer; recfx leaves every table where it is, the same ``Parameter`` with its own storage.
The kernels take one base tensor and an element offset a table, so the offsets here are the distances between the
tables' addresses and that base. The autograd function holds the tables alive until its backward has run.

Gradients of ``weight.grad`` come from the same kernel as the fused SGD step: a step of -1 from zero is the gradient.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import fbgemm_gpu  # noqa: F401  (loads the operators)
import torch
from torch.autograd.function import once_differentiable

from recfx.ir.tables import TableSpec
from recfx.lowering.registry import Declined, LookupBatch, LookupKernel, LookupSpec

_POOLING = {"SUM": 0, "MEAN": 1}
_FUSED = ("sgd", "adagrad", "rowwise_adagrad")
_FLOAT32 = 0  # fbgemm_gpu.split_embedding_configs.SparseType.FP32.as_int()


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
    layout = _Layout(spec)
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
            layout, weights, values, offsets, batch.per_sample_weights, *arguments
        )
        return output

    return lookup


class _Layout:
    """The constant arguments of FBGEMM's kernels, for all tables of a lookup or for one of them."""

    def __init__(self, spec: LookupSpec) -> None:
        # Not the weights: they may be replaced, and the old ones must be freed.
        self.tables, self.optimizers = spec.tables, spec.optimizers
        self.base = torch.empty(1, dtype=spec.weights[0].dtype, device="cpu")
        self.pooling = _POOLING[spec.pooling]
        self.whole = _Part(spec.tables, list(range(len(spec.tables))))
        self._parts: dict[int, _Part] = {}
        self._last: tuple[tuple[int, ...], torch.Tensor] | None = None

    def part(self, table: int) -> _Part:
        """The arguments for one table alone."""
        if table not in self._parts:
            self._parts[table] = _Part(self.tables, [table])
        return self._parts[table]

    def weight_offsets(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """``[F]`` distances, in elements, from the base to each feature's table; made again only when a table moves."""
        addresses = tuple(weight.data_ptr() for weight in weights)
        if self._last is None or self._last[0] != addresses:
            self._last = addresses, _distances(self.base, addresses, self.whole.table_of_feature)
        return self._last[1]


class _Part:
    """The constant arguments for some adjacent tables; columns and bags stay those of the whole lookup."""

    def __init__(self, described: tuple[TableSpec, ...], tables: list[int]) -> None:
        self.tables = tables
        every_feature = [table for table, each in enumerate(described) for _ in each.feature_names]
        first = every_feature.index(tables[0])
        self.table_of_feature = [table for table in every_feature if table in tables]
        self.features = first, first + len(self.table_of_feature)
        columns = [0, *accumulate(described[table].embedding_dim for table in every_feature)]
        self.total_dim = columns[-1]
        self.max_dim = max(described[table].embedding_dim for table in tables)
        self.dim_offsets = torch.tensor(
            columns[self.features[0] : self.features[1] + 1], dtype=torch.int32, device="cpu"
        )
        starts, total = {}, 0
        for table in tables:
            starts[table] = total
            total += described[table].num_embeddings
        cumulative = [starts[table] for table in self.table_of_feature] + [total]
        self.row_offsets = torch.tensor(cumulative, dtype=torch.int64, device="cpu")
        self.row_bits = max(1, total.bit_length())
        self.at_start = torch.zeros(len(self.table_of_feature), dtype=torch.int64, device="cpu")
        self.placements = torch.zeros(len(self.table_of_feature), dtype=torch.int32, device="cpu")


def _distances(base: torch.Tensor, addresses: tuple[int, ...], table_of_feature: list[int]) -> torch.Tensor:
    origin, size = base.data_ptr(), base.element_size()
    return torch.tensor(
        [(addresses[table] - origin) // size for table in table_of_feature], dtype=torch.int64, device="cpu"
    )


class _TableBatchedLookup(torch.autograd.Function):
    """FBGEMM's forward; its backward as gradients of ``weight.grad``, or as the fused optimizer's step."""

    @staticmethod
    def forward(
        ctx: Any,
        layout: _Layout,
        weights: list[torch.Tensor],
        values: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        *arguments: torch.Tensor,
    ) -> torch.Tensor:
        part = layout.whole
        scale = _float_or_none(per_sample_weights)
        ctx.layout, ctx.weights, ctx.values, ctx.offsets = layout, weights, values, offsets
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
            _FLOAT32,
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layout: _Layout = ctx.layout
        grad_output = grad_output.float().contiguous()
        scale_gradient = None
        if ctx.needs_input_grad[4]:  # reads the rows, so before they are updated
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
            _fused_step(ctx, layout, grad_output)
            gradients = [None] * (len(ctx.needs_input_grad) - 5)
        return (None, None, None, None, scale_gradient, *gradients)


def _weight_gradients(ctx: Any, layout: _Layout, grad_output: torch.Tensor) -> list[torch.Tensor | None]:
    wanted = ctx.needs_input_grad[5:]
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
        _distances(base, addresses, part.table_of_feature),
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
        _FLOAT32,
    )
    return [
        total.to(weight.dtype) if want else None
        for total, weight, want in zip(totals, ctx.weights, wanted, strict=True)
    ]


def _fused_step(ctx: Any, layout: _Layout, grad_output: torch.Tensor) -> None:
    optimizers = layout.optimizers
    for weight, optimizer in zip(ctx.weights, optimizers, strict=True):
        optimizer.prepare(weight)
    trained = [weight.requires_grad for weight in ctx.weights]
    # FBGEMM's CPU Adagrad addresses its state by the weights' offsets, so the two must be laid out alike: one call a
    # table. So must frozen tables, and learning rates that have come apart since conversion.
    one_call = optimizers[0].kind != "adagrad" and all(trained)
    if one_call and len({optimizer.settings() for optimizer in optimizers}) == 1:
        weight_offsets = layout.weight_offsets(ctx.weights)
        state_base = torch.empty(1, dtype=torch.float32, device="cpu")
        states = tuple(optimizer.state["sum"].data_ptr() for optimizer in optimizers if "sum" in optimizer.state)
        state_offsets = _distances(state_base, states, layout.whole.table_of_feature) if states else weight_offsets
        _step_part(ctx, layout.whole, grad_output, layout.base, weight_offsets, state_base, state_offsets)
    else:
        for table, weight in enumerate(ctx.weights):
            if trained[table]:
                part, state = layout.part(table), optimizers[table].state.get("sum", layout.base)
                at_start = part.at_start
                _step_part(ctx, part, grad_output, weight.detach().view(-1), at_start, state.view(-1), at_start)
    steps = [
        optimizer.state["step"]
        for optimizer, trains in zip(optimizers, trained, strict=True)
        if trains and "step" in optimizer.state
    ]
    if steps:
        torch._foreach_add_(steps, 1)


def _step_part(
    ctx: Any,
    part: _Part,
    grad_output: torch.Tensor,
    weight_base: torch.Tensor,
    weight_offsets: torch.Tensor,
    state_base: torch.Tensor,
    state_offsets: torch.Tensor,
) -> None:
    """One optimizer step of the tables of ``part``; all other arguments are the whole lookup's."""
    layout: _Layout = ctx.layout
    optimizer = layout.optimizers[part.tables[0]]
    batch_size = grad_output.shape[0]
    first, last = part.features
    arguments: list[Any] = [
        grad_output,
        weight_base,
        part.placements,
        weight_offsets,
        part.dim_offsets,
        part.max_dim,
        part.row_offsets,
        part.row_bits,
        ctx.values,
        ctx.offsets[first * batch_size : last * batch_size + 1],
        layout.pooling,
        ctx.scale,
        False,  # stochastic rounding
    ]
    learning_rate = torch.tensor(float(optimizer.group["lr"]), dtype=torch.float32, device="cpu")
    if optimizer.kind == "sgd":
        torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu(*arguments, learning_rate, _FLOAT32)
        return
    arguments += [state_base, part.placements, state_offsets, learning_rate, float(optimizer.group["eps"])]
    if optimizer.kind == "adagrad":
        torch.ops.fbgemm.split_embedding_backward_codegen_adagrad_cpu(*arguments, _FLOAT32)
    else:
        torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu(*arguments, 0.0, 0, 0.0, _FLOAT32)


def _float_or_none(per_sample_weights: torch.Tensor | None) -> torch.Tensor | None:
    """FBGEMM's kernels take an undefined tensor, None in Python, as "no weights"; an empty one they would read."""
    return None if per_sample_weights is None else per_sample_weights.detach().float()
