"""The backward of recfx's own lookups on the CPU: all tables of a lookup in one call, whatever the rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recfx.kernels.fused_step import fused_step_
from recfx.kernels.per_sample_weights import per_sample_weight_gradients
from recfx.lowering._step_counts import StepCounts
from recfx.lowering._trained_batch import TrainedBatch
from recfx.lowering.registry import LookupSpec
from recfx.optim.rules.rule import StepNumbers
from recfx.optim.rules.sgd import SGD

_SETTINGS = ("lr", "weight_decay", "eps", "betas")


class CpuBackward:
    """The backward of one lookup.

    Args:
        spec: the lookup. Its weights are not kept.
    """

    def __init__(self, spec: LookupSpec) -> None:
        self.optimizers = spec.optimizers
        self.table_of_feature = [table for table, each in enumerate(spec.tables) for _ in each.feature_names]
        self.mean = spec.pooling == "MEAN"
        self._counts = StepCounts(spec.optimizers)
        self._ready: list[int] = []

    def scale_gradient(self, batch: TrainedBatch, grad_output: torch.Tensor) -> torch.Tensor:
        """See ``Backward``."""
        tables = [weight.detach() for weight in batch.weights]
        return per_sample_weight_gradients(batch.values, batch.offsets, grad_output, tables, self.table_of_feature)

    def weight_gradients(
        self, batch: TrainedBatch, grad_output: torch.Tensor, wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """See ``Backward``. A step of SGD from zero with learning rate -1 is the gradient."""
        totals = [
            # The operator leaves tables alone that are not wanted; of those, it takes the shape.
            torch.zeros(weight.shape, dtype=torch.float32, device="cpu")
            if want
            else torch.empty(0, weight.shape[1], dtype=torch.float32, device="cpu")
            for weight, want in zip(batch.weights, wanted, strict=True)
        ]
        numbers = list(StepNumbers(-1.0)) * len(totals)
        self._run(batch, grad_output, totals, [], list(wanted), SGD.name, numbers)
        return [total if want else None for total, want in zip(totals, wanted, strict=True)]

    def step(self, batch: TrainedBatch, grad_output: torch.Tensor) -> None:
        """See ``Backward``. Frozen tables are left alone, and so are their states."""
        trained = [weight.requires_grad for weight in batch.weights]
        if not any(trained):
            return
        rule = self.optimizers[0].rule  # tables of one lookup have the same rule
        states = self._states(batch.weights, trained)
        # Only rules that save the number of steps read it.
        counted = self._counts.next() if rule.saves_step else [0.0] * len(trained)
        weights = [weight.detach() for weight in batch.weights]  # a step is not an edit that autograd should see
        self._run(batch, grad_output, weights, states, trained, rule.name, self._numbers(counted))
        self._counts.count(trained)

    def _states(self, weights: list[torch.Tensor], trained: list[bool]) -> list[list[torch.Tensor]]:
        """The states of each table, by number; those of a table that is not trained are not read."""
        names = [state.name for state in self.optimizers[0].rule.states]
        found = [[optimizer.state.get(name) for optimizer in self.optimizers] for name in names]
        ready = [id(state) for states in found for state in states]
        if ready != self._ready or None in ready:
            for optimizer, weight, is_trained in zip(self.optimizers, weights, trained, strict=True):
                if is_trained:
                    optimizer.prepare(weight)
            nothing = torch.empty(0, dtype=torch.float32, device="cpu")
            found = [[optimizer.state.get(name, nothing) for optimizer in self.optimizers] for name in names]
            self._ready = [id(state) for states in found for state in states]
        return found

    def _numbers(self, counted: list[float]) -> list[float]:
        """``StepNumbers`` of all tables, computed once for each setting that they share."""
        numbers: list[float] = []
        known: dict[Any, list[float]] = {}
        for optimizer, step in zip(self.optimizers, counted, strict=True):
            group = optimizer.group
            key = (*(group.get(name) for name in _SETTINGS), step)
            if key not in known:
                known[key] = [float(number) for number in optimizer.rule.step_numbers(step, group)]
            numbers += known[key]
        return numbers

    def _run(
        self,
        batch: TrainedBatch,
        grad_output: torch.Tensor,
        weights: list[torch.Tensor],
        states: list[list[torch.Tensor]],
        is_stepped: list[bool],
        rule: str,
        numbers: list[float],
    ) -> None:
        first, second = (*states, [], [])[:2]
        fused_step_(
            batch.values,
            batch.offsets,
            grad_output,
            weights,
            first,
            second,
            self.table_of_feature,
            is_stepped,
            rule,
            numbers,
            self.mean,
            batch.scale,
        )
