"""Target ``reference``: plain ATen, one call per feature. It serves every lookup, and tests compare targets with it."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from recfx.ir.node_kinds import NOT_COMBINED
from recfx.kernels.lookup.embedding_bag import embedding, embedding_bag
from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients_reference
from recfx.lowering.registry import LookupBatch, LookupKernel, LookupSpec, Outputs
from recfx.lowering.step.trainable_lookup import Backward, LookedUp, TrainableLookup
from recfx.lowering.step.trained_batch import Gradients, TrainedBatch, feature_bags, gradients_by_table


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel: with autograd's own backward, or with the fused step if an optimizer is attached."""
    fused = spec.optimizers[0] is not None
    spec = replace(spec, weights=[])  # they may be replaced: a kernel must not keep the old ones alive
    trainable = TrainableLookup(AtenBackward(spec))

    def lookup(weights: list[torch.Tensor], batch: LookupBatch) -> Outputs:
        values, offsets = batch.values.to(torch.int64), batch.offsets.to(torch.int64)

        def pool(scale: torch.Tensor | None) -> Outputs:
            if spec.combine == NOT_COMBINED:
                return tuple(
                    embedding(weights[bag.table], bag.rows, spec.tables[bag.table].has_index)
                    for bag in feature_bags(spec.tables, values, offsets, batch.batch_size)
                )
            pooled = [
                embedding_bag(weights[bag.table], bag.rows, bag.offsets, spec.combine, bag.of_ids(scale))
                for bag in feature_bags(spec.tables, values, offsets, batch.batch_size)
            ]
            return (torch.cat(pooled, dim=1),)

        if fused and torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            return trainable(weights, offsets, batch.per_sample_weights, lambda scale: LookedUp(pool(scale), values))
        return pool(batch.per_sample_weights)

    lookup.trainable = trainable  # type: ignore[attr-defined]  # of a function
    return lookup


class AtenBackward(Backward):
    """The backward of a lookup in ATen; autograd's own serves where this target looks up tables without optimizers."""

    def scale_gradient(self, batch: TrainedBatch, grad_output: torch.Tensor) -> torch.Tensor:
        weights, tables = [weight.detach() for weight in batch.weights], self.table_of_feature
        return per_sample_weight_gradients_reference(batch.values, batch.offsets, grad_output, weights, tables)

    def weight_gradients(
        self, batch: TrainedBatch, gradients: Gradients, is_needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        needed = {table for table, is_one in enumerate(is_needed) if is_one}
        totals: list[torch.Tensor | None] = [None] * len(is_needed)
        for table, (rows, by_row) in self._by_table(batch, gradients, needed).items():
            totals[table] = by_row.new_zeros(batch.weights[table].shape).index_add_(0, rows, by_row)
        return totals

    def step(self, batch: TrainedBatch, gradients: Gradients) -> None:
        trained = {table for table, weight in enumerate(batch.weights) if weight.requires_grad}
        for table, (rows, by_row) in self._by_table(batch, gradients, trained).items():
            self.step_rows(batch.weights[table], self.optimizers[table], rows, by_row)

    def _by_table(
        self, batch: TrainedBatch, gradients: Gradients, chosen: set[int]
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return gradients_by_table(batch, gradients, self.tables, self.combine, chosen)
