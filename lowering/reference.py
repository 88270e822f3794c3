"""Target ``reference``: plain ATen, one call per feature. It serves every lookup, and tests compare targets with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from recfx.errors import Diagnostic
from recfx.ir.facts import LookupFacts
from recfx.kernels.lookup.embedding_bag import embedding_bag, per_sample_weight_gradients, row_gradients
from recfx.lowering.registry import LookupBatch, LookupKernel, LookupSpec
from recfx.lowering.step.profiler_ranges import BACKWARD, later_range
from recfx.lowering.step.step_once import StepOnce, Triggers, leaf_gradients, leave_for_step, leaves, step_by_weight


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """Always None: this target serves every lookup."""
    return None


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel: with autograd's own backward, or with the fused step if an optimizer is attached."""
    fused = spec.optimizers[0] is not None
    spec = replace(spec, weights=[])  # they may be replaced: a kernel must not keep the old ones alive
    once = StepOnce(spec.optimizers)

    def lookup(weights: list[torch.Tensor], batch: LookupBatch) -> torch.Tensor:
        bags = list(_feature_bags(spec, batch))
        if fused and torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            triggers = once.triggers(weights)
            output: torch.Tensor = _FusedLookup.apply(
                batch.per_sample_weights, spec, (once, triggers), weights, bags, *leaves(triggers)
            )
            return output
        return _pool(spec, weights, bags, batch.per_sample_weights)

    return lookup


@dataclass(frozen=True)
class _FeatureBags:
    """One feature's share of a batch: ``rows [n]``, ``offsets [B + 1]``, and the range of its ids in the batch."""

    table: int
    rows: torch.Tensor
    offsets: torch.Tensor
    begin: int
    end: int


def _feature_bags(spec: LookupSpec, batch: LookupBatch) -> Iterator[_FeatureBags]:
    values, offsets = batch.values.to(torch.int64), batch.offsets.to(torch.int64)
    tables = [position for position, table in enumerate(spec.tables) for _ in table.feature_names]
    if values.is_meta:  # lengths are not known, and shapes do not depend on them
        for feature, table in enumerate(tables):
            first = feature * batch.batch_size
            yield _FeatureBags(table, values, offsets[first : first + batch.batch_size + 1], 0, values.numel())
        return
    if batch.batch_size == 0:
        borders = [0] * (len(tables) + 1)
    else:
        borders = offsets[:: batch.batch_size].tolist()
    for feature, table in enumerate(tables):
        begin, end = borders[feature], borders[feature + 1]
        first = feature * batch.batch_size
        yield _FeatureBags(table, values[begin:end], offsets[first : first + batch.batch_size + 1] - begin, begin, end)


def _pool(
    spec: LookupSpec, weights: list[torch.Tensor], bags: list[_FeatureBags], per_sample_weights: torch.Tensor | None
) -> torch.Tensor:
    pooled = []
    for bag in bags:
        scale = None if per_sample_weights is None else per_sample_weights[bag.begin : bag.end]
        pooled.append(embedding_bag(weights[bag.table], bag.rows, bag.offsets, spec.combine, scale))
    return torch.cat(pooled, dim=1)


class _Part:
    """What one backward contributes to a fused step."""

    def __init__(
        self,
        lookup: StepOnce,
        optimizers: Sequence[Any],
        weights: list[torch.Tensor],
        gradients: dict[int, list[tuple[torch.Tensor, torch.Tensor]]],
    ) -> None:
        self.lookup, self.optimizers, self.weights, self._gradients = lookup, optimizers, weights, gradients

    def of_table(self, table: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self._gradients[table]
        return torch.cat([rows for rows, _ in parts]), torch.cat([by_row for _, by_row in parts])

    def step_with(self, parts: Sequence[_Part]) -> None:
        every_table = tuple(range(len(self.weights)))
        step_by_weight([(part, every_table) for part in parts])

    def step_shared(self, parts: Sequence[tuple[Any, tuple[int, ...]]]) -> bool:
        return False


class _FusedLookup(torch.autograd.Function):
    """The usual forward; the backward leaves its part of the optimizer's step, for all features of a table at once."""

    @staticmethod
    def forward(
        ctx: Any,
        per_sample_weights: torch.Tensor | None,
        spec: LookupSpec,
        step: tuple[StepOnce, Triggers],
        weights: list[torch.Tensor],
        bags: list[_FeatureBags],
        *arguments: torch.Tensor,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.step, ctx.weights, ctx.bags = spec, step, weights, bags
        ctx.per_sample_weights, ctx.kept = per_sample_weights, []
        return _pool(spec, weights, bags, per_sample_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with later_range(ctx.step[0].node, BACKWARD):
            return _FusedLookup._backward(ctx, grad_output)

    @staticmethod
    def _backward(ctx: Any, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        once, triggers = ctx.step
        if grad_output is None:  # there is no gradient; zeros instead would cause a step
            return (None, None, None, None, None, *leaf_gradients(triggers))
        spec: LookupSpec = ctx.spec
        scales: torch.Tensor | None = ctx.per_sample_weights
        scale_gradient = torch.zeros_like(scales) if scales is not None and ctx.needs_input_grad[0] else None
        touched: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        dims = [spec.tables[bag.table].embedding_dim for bag in ctx.bags]
        for bag, gradient in zip(ctx.bags, grad_output.split(dims, dim=1), strict=True):
            scale = None if scales is None else scales[bag.begin : bag.end]
            bag_of_row, by_row = row_gradients(gradient, bag.rows, bag.offsets, spec.combine, scale)
            touched.setdefault(bag.table, []).append((bag.rows, by_row))
            if scale_gradient is not None:  # this reads the rows, so it comes before they are updated
                weight = ctx.weights[bag.table].detach()
                found = per_sample_weight_gradients(gradient, weight, bag.rows, bag_of_row)
                scale_gradient[bag.begin : bag.end] = found.to(scale_gradient.dtype)
        leave_for_step(triggers, ctx.kept, _Part(once, spec.optimizers, ctx.weights, touched))
        return (scale_gradient, None, None, None, None, *leaf_gradients(triggers))
