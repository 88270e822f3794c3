"""The backward of recfx's own lookups on the CPU: all tables of a lookup in one call, whatever the rule."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from recfx.errors import IdRangeError
from recfx.kernels.fused_step import fused_step_
from recfx.kernels.per_sample_weights import per_sample_weight_gradients
from recfx.lowering._step_counts import StepCounts
from recfx.lowering._trained_batch import TrainedBatch
from recfx.lowering.registry import LookupSpec
from recfx.optim.rules.rule import STEP, Rule, StepNumbers
from recfx.optim.rules.sgd import SGD

_SETTINGS = ("lr", "weight_decay", "eps")


class CpuBackward:
    """The backward of one lookup.

    Args:
        spec: the lookup. Its weights are not kept.
    """

    def __init__(self, spec: LookupSpec) -> None:
        self.tables, self.optimizers = spec.tables, spec.optimizers
        self.table_of_feature = [table for table, each in enumerate(spec.tables) for _ in each.feature_names]
        self.mean = spec.pooling == "MEAN"
        self._counts = StepCounts(spec.optimizers)
        self._known: list[weakref.ref[torch.Tensor] | None] = []

    def scale_gradient(self, batch: TrainedBatch, grad_output: torch.Tensor) -> torch.Tensor:
        """See ``Backward``."""
        tables = [weight.detach() for weight in batch.weights]
        try:
            return per_sample_weight_gradients(batch.values, batch.offsets, grad_output, tables, self.table_of_feature)
        except IndexError as error:
            raise self._beyond_the_end(batch, tables) from error

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
        self._run(batch, grad_output, totals, [], list(wanted), SGD.name, numbers, None)
        return [total if want else None for total, want in zip(totals, wanted, strict=True)]

    def step(self, batch: TrainedBatch, grad_output: torch.Tensor) -> None:
        """See ``Backward``. Frozen tables are left alone, and so are their states."""
        trained = [weight.requires_grad for weight in batch.weights]
        if not any(trained):
            return
        rule = self.optimizers[0].rule  # tables of one lookup have the same rule
        states = self._states(batch.weights, trained)
        counts = self._counts.shared()
        # Only rules that save the number of steps read it.
        counted = [0.0] * len(trained) if counts is None or not rule.saves_step else (counts + 1).tolist()
        weights = [weight.detach() for weight in batch.weights]  # a step is not an edit that autograd should see
        self._run(batch, grad_output, weights, states, trained, rule.name, self._numbers(counted), counts)

    def _states(self, weights: list[torch.Tensor], trained: list[bool]) -> list[list[torch.Tensor]]:
        """The states of each table, by number; those of a table that is not trained are not read."""
        rule = self.optimizers[0].rule
        if not self._is_known(rule, trained):
            for optimizer, weight, is_trained in zip(self.optimizers, weights, trained, strict=True):
                if is_trained:
                    optimizer.prepare(weight)
            self._known = [
                weakref.ref(optimizer.state[state.name]) if is_trained else None  # others may not be ready
                for optimizer, is_trained in zip(self.optimizers, trained, strict=True)
                for state in rule.states
            ]
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        return [[optimizer.state.get(state.name, nothing) for optimizer in self.optimizers] for state in rule.states]

    def _is_known(self, rule: Rule, trained: list[bool]) -> bool:
        """Whether all states are those that were prepared; any may be replaced between steps, as by a checkpoint."""
        known = iter(self._known)
        for optimizer, is_trained in zip(self.optimizers, trained, strict=True):
            state = optimizer.state
            for each in rule.states:
                reference = next(known, None)
                if is_trained and (reference is None or state.get(each.name) is not reference()):
                    return False
            if is_trained and rule.counts_steps and STEP not in state:
                return False
        return True

    def _numbers(self, counted: list[float]) -> list[float]:
        """``StepNumbers`` of all tables, computed once for each setting that they share."""
        numbers: list[float] = []
        known: dict[Any, list[float]] = {}
        for optimizer, step in zip(self.optimizers, counted, strict=True):
            group = optimizer.group
            betas = group.get("betas")  # a list, if the settings come from a file
            key = (*map(group.get, _SETTINGS), betas and tuple(betas), step)
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
        counts: torch.Tensor | None,
    ) -> None:
        first, second = (*states, [], [])[:2]
        try:
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
                counts,
            )
        except IndexError as error:
            raise self._beyond_the_end(batch, batch.weights) from error

    def _beyond_the_end(self, batch: TrainedBatch, weights: list[torch.Tensor]) -> Exception:
        """The error for a row that the forward looked up and that its table no longer has; the first table with one."""
        batch_size = (batch.offsets.numel() - 1) // len(self.table_of_feature)
        borders = batch.offsets[::batch_size].tolist()
        for feature, table in enumerate(self.table_of_feature):
            rows = batch.values[borders[feature] : borders[feature + 1]]
            last, name = weights[table].shape[0] - 1, self.tables[table].name
            if rows.numel() and int(rows.max()) > last:
                return IdRangeError(
                    f"the backward of table {name!r} reached row {int(rows.max())}, but its last row is {last}: since "
                    "the forward, the weight was replaced by a smaller one, or the batch was overwritten.",
                    reason="row_beyond_table",
                    module_path=name,
                    what_to_do="call backward() before the table or the batch changes. Nothing was stepped.",
                )
        return IndexError("a row was beyond the end of its table while a step began, and is no longer")
