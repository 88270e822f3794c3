"""FBGEMM's backward on the CPU.

Gradients for ``weight.grad`` come from the same kernel as the fused SGD step: a step from zero with learning rate -1 is
the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fbgemm_gpu  # noqa: F401  (loads the operators)
import torch

from recfx.errors import ConversionError
from recfx.lowering.fbgemm.arguments import FBGEMM_RULES, FLOAT32, Layout, Part, StateArguments, distances
from recfx.lowering.step.step_numbers import StepCounts
from recfx.lowering.step.trainable_lookup import Gradients, TrainedBatch

_Where = tuple[torch.Tensor, torch.Tensor]


class FbgemmBackward:
    """The backward kernels of one lookup; caches what does not change from batch to batch."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.optimizers = layout.optimizers
        self._state_base = torch.empty(1, dtype=torch.float32, device="cpu")
        self._addresses: tuple[int, ...] | None = None
        self._state_offsets: torch.Tensor | None = None
        self._counts = StepCounts(layout.optimizers)

    def step(self, batch: TrainedBatch, gradients: Gradients) -> None:
        (grad_output,) = gradients
        assert grad_output is not None
        kernel = FBGEMM_RULES[self.optimizers[0].rule]  # tables of one lookup have the same rule
        self._prepare(batch.weights, kernel.state)
        trained = [weight.requires_grad for weight in batch.weights]
        # Frozen tables, and learning rates that have diverged since the conversion, need one call per table as well.
        one_call = kernel.tables_in_one_call and all(trained)
        rates = self._learning_rates()
        # The part, (base, offsets) of weights and of states, and the learning rate.
        calls: list[tuple[Part, _Where, _Where, tuple[torch.Tensor, float]]] = []
        if one_call and len({(id(rate), eps) for rate, eps in rates}) == 1:
            offsets = self.layout.weight_offsets(batch.weights)
            states = self._state_base, offsets if self._state_offsets is None else self._state_offsets
            calls.append((self.layout.whole, (self.layout.base, offsets), states, rates[0]))
        else:
            for table, weight in enumerate(batch.weights):
                if trained[table]:
                    part = self.layout.part(table)
                    state = self.optimizers[table].state.get(kernel.state, self.layout.base)
                    weights = weight.detach().view(-1), part.at_start
                    calls.append((part, weights, (state.view(-1), part.at_start), rates[table]))
        for part, weights, (base, offsets), rate in calls:
            state = StateArguments(base, part.placements, offsets, *rate)
            kernel.step(self._arguments(batch, part, grad_output, *weights), state)
        self._counts.count(trained)

    def _prepare(self, weights: list[torch.Tensor], state: str) -> None:
        """Make sure that the kernels can address every state; does nothing unless a state has moved."""
        states = [optimizer.state.get(state) for optimizer in self.optimizers]
        addresses = tuple(-1 if state is None else state.data_ptr() for state in states)
        if addresses == self._addresses:
            return
        for optimizer, weight in zip(self.optimizers, weights, strict=True):
            optimizer.prepare(weight)
        states = [optimizer.state.get(state) for optimizer in self.optimizers]
        self._addresses = tuple(-1 if state is None else state.data_ptr() for state in states)
        if states[0] is not None:
            self._state_offsets = distances(self._state_base, self._addresses, self.layout.whole.table_of_feature)

    def _learning_rates(self) -> list[tuple[torch.Tensor, float]]:
        """The learning rate and eps of each table; equal learning rates share one tensor."""
        made: dict[float, torch.Tensor] = {}
        rates = []
        for optimizer in self.optimizers:
            group = optimizer.group
            if group.get("weight_decay", 0):
                raise ConversionError(
                    "weight_decay was switched on after the conversion.",
                    reason="optimizer_setting_changed",
                    what_to_do="convert again: FBGEMM's kernels have no weight decay like torch.optim's.",
                )
            rate = float(group["lr"])
            if rate not in made:
                made[rate] = torch.tensor(rate, dtype=torch.float32, device="cpu")
            rates.append((made[rate], float(group.get("eps", 0.0))))
        return rates

    def _arguments(
        self, batch: TrainedBatch, part: Part, grad_output: torch.Tensor, base: torch.Tensor, offsets: torch.Tensor
    ) -> list[Any]:
        """What all kernels take for the tables of ``part``, which are at ``offsets`` from ``base``."""
        batch_size = grad_output.shape[0]
        first, last = part.features
        return [
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
            self.layout.pooling,
            batch.scale,
            False,  # stochastic rounding
        ]

    def scale_gradient(self, batch: TrainedBatch, grad_output: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        return torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
            grad_output,
            layout.base,
            layout.weight_offsets(batch.weights),
            layout.whole.dim_offsets,
            batch.values,
            batch.offsets,
            torch.ones(len(layout.whole.table_of_feature), dtype=torch.int32, device="cpu"),
        )

    def weight_gradients(
        self, batch: TrainedBatch, gradients: Gradients, is_needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """See ``Backward``. If some tables are not needed, there is one call per table."""
        (grad_output,) = gradients
        assert grad_output is not None
        totals = [
            torch.zeros(weight.shape, dtype=torch.float32, device="cpu") if needed else None
            for weight, needed in zip(batch.weights, is_needed, strict=True)
        ]
        if all(is_needed):
            base = torch.empty(1, dtype=torch.float32, device="cpu")
            part = self.layout.whole
            addresses = tuple(total.data_ptr() for total in totals if total is not None)
            self._add(part, batch, grad_output, base, distances(base, addresses, part.table_of_feature))
            return totals
        for table, total in enumerate(totals):
            if total is not None:
                part = self.layout.part(table)
                self._add(part, batch, grad_output, total.view(-1), part.at_start)
        return totals

    def _add(
        self, part: Part, batch: TrainedBatch, grad_output: torch.Tensor, base: torch.Tensor, offsets: torch.Tensor
    ) -> None:
        """Add the gradients of the tables of ``part`` at ``offsets`` from ``base``."""
        rate = torch.tensor(-1.0, dtype=torch.float32, device="cpu")
        arguments = self._arguments(batch, part, grad_output, base, offsets)
        torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu(*arguments, rate, FLOAT32)
