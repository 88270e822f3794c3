"""Target ``reference``: plain ATen, one call per feature. It serves every lookup, and tests compare targets with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from recfx.errors import Diagnostic
from recfx.ir.context import LookupFacts
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.kernels.lookup.embedding_bag import embedding, embedding_bag, per_sample_weight_gradients, row_gradients
from recfx.lowering.registry import LookupBatch, LookupKernel, LookupSpec, Outputs
from recfx.lowering.step.trainable_lookup import Backward, Gradients, LookedUp, TrainableLookup, TrainedBatch, present


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """Always None: this target serves every lookup."""
    return None


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel: with autograd's own backward, or with the fused step if an optimizer is attached."""
    fused = spec.optimizers[0] is not None
    spec = replace(spec, weights=[])  # they may be replaced: a kernel must not keep the old ones alive
    trainable = TrainableLookup(spec, AtenBackward(spec))

    def lookup(weights: list[torch.Tensor], batch: LookupBatch) -> Outputs:
        values, offsets = batch.values.to(torch.int64), batch.offsets.to(torch.int64)

        def pool(scale: torch.Tensor | None) -> Outputs:
            if spec.combine == NOT_COMBINED:
                return tuple(
                    embedding(weights[bag.table], bag.rows, spec.tables[bag.table].has_index)
                    for bag in _feature_bags(spec, values, offsets, batch.batch_size)
                )
            pooled = [
                embedding_bag(weights[bag.table], bag.rows, bag.offsets, spec.combine, bag.of_ids(scale))
                for bag in _feature_bags(spec, values, offsets, batch.batch_size)
            ]
            return (torch.cat(pooled, dim=1),)

        if fused and torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            return trainable(weights, offsets, batch.per_sample_weights, lambda scale: LookedUp(pool(scale), values))
        return pool(batch.per_sample_weights)

    return lookup


@dataclass(frozen=True)
class _FeatureBags:
    """One feature's share of a batch: ``rows [n]``, ``offsets [B + 1]``, and the range of its ids in the batch."""

    table: int
    rows: torch.Tensor
    offsets: torch.Tensor
    begin: int
    end: int

    def of_ids(self, scale: torch.Tensor | None) -> torch.Tensor | None:
        """The part of the batch's per-sample weights that belongs to this feature."""
        return None if scale is None else scale[self.begin : self.end]


def _feature_bags(
    spec: LookupSpec, values: torch.Tensor, offsets: torch.Tensor, batch_size: int
) -> Iterator[_FeatureBags]:
    tables = [position for position, table in enumerate(spec.tables) for _ in table.feature_names]
    if offsets.is_meta:  # lengths are not known, and shapes do not depend on them
        for feature, table in enumerate(tables):
            first = feature * batch_size
            yield _FeatureBags(table, values, offsets[first : first + batch_size + 1], 0, values.numel())
        return
    borders = offsets[::batch_size].tolist() if batch_size else [0] * (len(tables) + 1)
    for feature, table in enumerate(tables):
        begin, end = borders[feature], borders[feature + 1]
        first = feature * batch_size
        yield _FeatureBags(table, values[begin:end], offsets[first : first + batch_size + 1] - begin, begin, end)


class AtenBackward(Backward):
    """The backward of a lookup in ATen; autograd's own serves where this target looks up tables without optimizers."""

    def __init__(self, spec: LookupSpec) -> None:
        self._spec = replace(spec, weights=[])  # they may be replaced: a kernel must not keep the old ones alive

    def scale_gradient(self, batch: TrainedBatch, grad_output: torch.Tensor) -> torch.Tensor:
        parts = torch.zeros(batch.values.numel(), dtype=torch.float32, device=batch.values.device)
        for bag, gradient in self._features(batch, (grad_output,)):
            bag_of_row, _ = row_gradients(gradient, bag.rows, bag.offsets, self._spec.combine)
            weight = batch.weights[bag.table].detach()
            parts[bag.begin : bag.end] = per_sample_weight_gradients(gradient, weight, bag.rows, bag_of_row)
        return parts

    def weight_gradients(
        self, batch: TrainedBatch, gradients: Gradients, is_needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        totals = [
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needed else None
            for weight, needed in zip(batch.weights, is_needed, strict=True)
        ]
        for bag, gradient in self._features(batch, gradients):
            total = totals[bag.table]
            if total is not None:
                total.index_add_(0, *self._by_row(batch, bag, gradient))
        return totals

    def step(self, batch: TrainedBatch, gradients: Gradients) -> None:
        touched: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for bag, gradient in self._features(batch, gradients):
            if batch.weights[bag.table].requires_grad:
                touched.setdefault(bag.table, []).append(self._by_row(batch, bag, gradient))
        for table, parts in touched.items():
            rows, by_row = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            self.step_rows(batch.weights[table], self._spec.optimizers[table], rows, by_row)

    def _by_row(
        self, batch: TrainedBatch, bag: _FeatureBags, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that a feature read, and the gradient of each."""
        scale = bag.of_ids(batch.scale)
        return present(bag.rows, row_gradients(gradient, bag.rows, bag.offsets, self._spec.combine, scale)[1])

    def _features(self, batch: TrainedBatch, gradients: Gradients) -> Iterator[tuple[_FeatureBags, torch.Tensor]]:
        """The bags of each feature that gets a gradient, and that of its columns; of its rows, if not combined."""
        dims = [table.embedding_dim for table in self._spec.tables for _ in table.feature_names]
        bags = _feature_bags(self._spec, batch.values, batch.offsets, batch.batch_size(len(dims)))
        if self._spec.combine != NOT_COMBINED:
            (gradient,) = gradients
            gradients = () if gradient is None else gradient.split(dims, dim=1)
        return ((bag, own) for bag, own in zip(bags, gradients, strict=True) if own is not None)
