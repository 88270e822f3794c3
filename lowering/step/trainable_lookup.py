"""The autograd function of targets whose kernels take all tables at once: any forward, with the target's backward.

A fused step waits until the backward pass has reached every lookup of the table. The function keeps the tables alive
until its backward has run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from recfx.errors import InputError
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.ir.tables import TableSpec
from recfx.kernels.lookup.embedding_bag import embedding
from recfx.lowering.registry import LookupSpec, Outputs
from recfx.lowering.step.profiler_ranges import BACKWARD, is_profiling, later_range, running_node
from recfx.lowering.step.step_once import GradientPart, StepOnce, Triggers, leaf_gradients, leave_for_step
from recfx.lowering.step.trained_batch import Gradients, TrainedBatch, reached


class LookedUp(NamedTuple):
    """What a forward returns: the lookup's outputs, and the rows that it read."""

    outputs: Outputs
    rows: torch.Tensor  # [n] int64, -1 if an id gets no gradient, which is for targets that take absent ids


class Backward(ABC):
    """A target's backward kernels, for one lookup, whose weights are not kept: they may be replaced."""

    def __init__(self, spec: LookupSpec) -> None:
        self.tables, self.optimizers, self.combine = spec.tables, spec.optimizers, spec.combine
        self.mean, self.unpooled = spec.combine == "MEAN", spec.combine == NOT_COMBINED
        self.table_of_feature = [table for table, described in enumerate(spec.tables) for _ in described.feature_names]

    @abstractmethod
    def scale_gradient(self, batch: TrainedBatch, grad_output: torch.Tensor) -> torch.Tensor:
        """The gradient of the per-sample weights, float32 ``[n]``. ``grad_output``: contiguous ``[B, sum D]``."""

    @abstractmethod
    def weight_gradients(
        self, batch: TrainedBatch, gradients: Gradients, is_needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """The gradients of the tables that are needed, float32 ``[rows, dim]``; None, and no work, for others."""

    @abstractmethod
    def step(self, batch: TrainedBatch, gradients: Gradients) -> None:
        """Take one step of the fused optimizers of all tables that are trained, and that ``gradients`` reach."""

    def step_rows(self, weight: torch.Tensor, optimizer: Any, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Take one step of a weight that several lookups read: rows ``[n]``, gradients float32 ``[n, dim]``."""
        optimizer.prepare(weight)
        optimizer.step(weight.data, rows, gradients)


Forward = Callable[[torch.Tensor | None], LookedUp]
_SCALE = 5  # position of the per-sample weights in the arguments of the autograd function


class TrainableLookup:
    """Makes a forward trainable by a target's kernels."""

    def __init__(self, backward: Backward) -> None:
        self.backward = backward
        self.once = StepOnce(backward.optimizers)

    def __call__(
        self,
        weights: list[torch.Tensor],
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        forward: Forward,
    ) -> Outputs:
        """The outputs of ``forward``, differentiable. It is called once, without autograd, with the per-sample weights
        as float32, which receive gradients. ``offsets`` are int64 ``[F * B + 1]``.
        """
        arguments: list[torch.Tensor] = []
        triggers: Triggers = []
        if torch.is_grad_enabled():
            if is_profiling():
                self.once.node = running_node()  # under which profiles show the backward and the step
            if self.backward.optimizers[0] is None:
                if self.backward.unpooled and any(weight._backward_hooks for weight in weights):
                    return self._by_key(weights, forward)
                arguments = list(weights)
            elif any(weight.requires_grad for weight in weights):
                triggers = self.once.triggers(weights)
                arguments = [triggered.trigger.leaf for triggered in triggers]
        return _TableBatchedLookup.apply(
            self.backward, (self.once, triggers), weights, offsets, forward, per_sample_weights, *arguments
        )

    def _by_key(self, weights: list[torch.Tensor], forward: Forward) -> Outputs:
        """The rows by an operator for each key: one node would hand None on to hooks of weights without a gradient.

        A loss does not reach the operators of keys that it does not use. Each keeps rows of its own, so that the batch
        may change before the backward.
        """
        with torch.no_grad():
            outputs, rows = forward(None)
        of_keys = zip(self.backward.table_of_feature, rows.split(list(map(len, outputs))), strict=True)
        return tuple(embedding(weights[table], rows_of_key) for table, rows_of_key in of_keys)


def changed_before_backward(tables: Sequence[TableSpec]) -> InputError:
    """The error of a backward that cannot read again what its forward has read."""
    return InputError(
        "the ids, their weights or the rows that a forward read were changed in place before its backward, which reads "
        "them again; or a weight was replaced by one of fewer rows, or of rows that do not lie one after the other.",
        reason="changed_before_backward",
        module_path=", ".join(table.name for table in tables),
        what_to_do="change them after the backward, or change a copy.",
    )


class _TableBatchedLookup(torch.autograd.Function):
    """Its backward returns gradients for ``weight.grad``, or runs the fused optimizer's step."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Backward, step: tuple[StepOnce, Triggers], weights: list[torch.Tensor],
        offsets: torch.Tensor, forward: Forward, per_sample_weights: torch.Tensor | None, *arguments: torch.Tensor,
    ) -> Outputs:  # fmt: skip
        # FBGEMM's kernels take an undefined tensor (None in Python) for "no weights", but would read an empty one.
        ctx.set_materialize_grads(False)
        scale = None if per_sample_weights is None else per_sample_weights.detach().float()
        looked_up = forward(scale)
        ctx.kernels, ctx.step, ctx.kept = kernels, step, []
        lengths: tuple[int, ...] = ()
        if kernels.unpooled:
            lengths = tuple(map(len, looked_up.outputs))
            read = zip(looked_up.outputs, kernels.table_of_feature, strict=True)
            ctx.mark_non_differentiable(*(rows for rows, table in read if not weights[table].requires_grad))
        # Inference tensors have no versions that would show a change.
        rows = looked_up.rows.clone() if looked_up.rows.is_inference() else looked_up.rows
        offsets = offsets.clone() if offsets.is_inference() else offsets
        scale = scale.clone() if scale is not None and scale.is_inference() else scale
        ctx.batch = TrainedBatch(weights, rows, offsets, scale, lengths)
        # What torch's ``save_for_backward`` notes; its hooks would make checkpoints run the forward again.
        noted = [rows, offsets, *([] if scale is None else [scale]), *(weights if ctx.needs_input_grad[_SCALE] else ())]
        ctx.versions = [(tensor, tensor._version) for tensor in noted if not tensor.is_inference()]
        ctx.scale_dtype = None if per_sample_weights is None else per_sample_weights.dtype
        return looked_up.outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with later_range(ctx.step[0].node, BACKWARD):
            return _TableBatchedLookup._backward(ctx, given)

    @staticmethod
    def _backward(ctx: Any, given: Gradients) -> tuple[torch.Tensor | None, ...]:
        kernels: Backward = ctx.kernels
        once, triggers = ctx.step
        if not [1 for gradient in given if gradient is not None]:  # zeros instead would cause a step
            weights = [None] * (len(ctx.needs_input_grad) - _SCALE - 1)
            return (*[None] * _SCALE, None, *(leaf_gradients(triggers) or weights))
        for tensor, version in ctx.versions:
            if tensor._version != version:
                raise changed_before_backward(kernels.tables)
        batch = ctx.batch
        if kernels.unpooled:
            given = tuple([None if gradient is None else gradient.resolve_neg().float() for gradient in given])
        elif given[0] is not None:
            given = (given[0].resolve_neg().float().contiguous(),)
        scale_gradient = None
        if ctx.needs_input_grad[_SCALE] and given[0] is not None:  # it reads the rows, before they are updated
            scale_gradient = kernels.scale_gradient(batch, given[0]).to(ctx.scale_dtype)
        gradients: list[torch.Tensor | None]
        if kernels.optimizers[0] is None:
            gradients = weight_gradients(kernels, batch, given, ctx.needs_input_grad[_SCALE + 1 :])
        else:
            leave_for_step(triggers, ctx.kept, GradientPart(once, kernels, batch, given))
            gradients = list(leaf_gradients(triggers))
        return (*[None] * _SCALE, scale_gradient, *gradients)


def weight_gradients(
    kernels: Backward, batch: TrainedBatch, given: Gradients, needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradients of the tables that are ``needed`` and reached, in their dtypes; None for others."""
    is_reached = reached(kernels.table_of_feature, given, len(needed))
    is_needed = [asked and has_gradient for asked, has_gradient in zip(needed, is_reached, strict=True)]
    if not any(is_needed):
        return [None] * len(is_needed)
    gradients = kernels.weight_gradients(batch, given, is_needed)
    return [
        None if gradient is None else gradient.to(weight.dtype)
        for gradient, weight in zip(gradients, batch.weights, strict=True)
    ]
