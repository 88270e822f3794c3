"""The backward of recfx's own lookups on the CPU: all tables of a lookup in one call, whatever the rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recfx.errors import IdRangeError
from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients
from recfx.kernels.step.fused_step import fused_step_
from recfx.lowering.registry import LookupSpec
from recfx.lowering.step.step_counts import StepCounts
from recfx.lowering.step.step_numbers import NumbersOfTables
from recfx.lowering.step.trained_batch import TrainedBatch
from recfx.optim.rules.rule import Rule, StepNumbers
from recfx.optim.rules.sgd import SGD


class CpuBackward:
    """The backward of one lookup.

    Args:
        tables: the names of its tables.
        optimizers: the fused optimizer of each table, all of one rule; or None.
        table_of_feature: the table that each feature reads.
        mean: whether it pools means.
    """

    def __init__(
        self, tables: Sequence[str], optimizers: Sequence[Any], table_of_feature: list[int], mean: bool
    ) -> None:
        self.tables, self.optimizers, self.table_of_feature, self.mean = tables, optimizers, table_of_feature, mean
        self.rule: Rule = SGD if optimizers[0] is None else optimizers[0].rule
        self.shared: tuple[Any, CpuBackward] | None = None  # see _cpu_shared_step
        self._counts = StepCounts(optimizers)
        self._trained: list[bool] = []
        self._numbers = NumbersOfTables(self.rule)
        self._nothing = torch.empty(0, dtype=torch.float32, device="cpu")

    @classmethod
    def of(cls, spec: LookupSpec) -> CpuBackward:
        """The backward of the lookup ``spec``, whose weights are not kept."""
        table_of_feature = [table for table, each in enumerate(spec.tables) for _ in each.feature_names]
        names = [table.name for table in spec.tables]
        return cls(names, spec.optimizers, table_of_feature, spec.combine == "MEAN")

    def scale_gradient(self, batch: TrainedBatch, grad_output: torch.Tensor) -> torch.Tensor:
        """See ``Backward``."""
        try:
            with torch.no_grad():
                return per_sample_weight_gradients(
                    batch.values, batch.offsets, grad_output, batch.weights, self.table_of_feature
                )
        except IndexError as error:
            raise self._beyond_the_end(batch) from error

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
        numbers: list[float] = list(StepNumbers(-1.0)) * len(totals)
        self._run(batch, grad_output, totals, [], list(wanted), SGD.name, numbers, None)
        return [total if want else None for total, want in zip(totals, wanted, strict=True)]

    def step(self, batch: TrainedBatch, grad_output: torch.Tensor) -> None:
        """See ``Backward``. Frozen tables are left alone, and so are their states."""
        trained = [weight.requires_grad for weight in batch.weights]
        if not any(trained):
            return
        try:
            self._step(batch, grad_output, trained)
        except RuntimeError:
            # The operator has checked every state before it changed anything.
            if not self._prepare(batch.weights, trained):
                raise
            self._step(batch, grad_output, trained)

    def _step(self, batch: TrainedBatch, grad_output: torch.Tensor, trained: list[bool]) -> None:
        # Looked up anew in every step, because any state may be replaced between steps, as by a checkpoint.
        held = [optimizer.state for optimizer in self.optimizers]
        counts = self._counts.of(held)
        if self.rule.counts_steps and (counts is None or trained != self._trained):
            self._prepare(batch.weights, trained)
            held = [optimizer.state for optimizer in self.optimizers]
            counts = self._counts.shared()
        self._trained = trained
        states = [self._tensors(held, each.name) for each in self.rule.states]
        # Only rules that save the number of steps read it.
        counted = (counts + 1).tolist() if counts is not None and self.rule.saves_step else None
        numbers = self._numbers.of([optimizer.group for optimizer in self.optimizers], counted)
        self._run(batch, grad_output, batch.weights, states, trained, self.rule.name, numbers, counts)

    def _tensors(self, held: list[dict[str, Any]], name: str) -> list[torch.Tensor]:
        """That state of each table; an empty tensor, which the operator refuses if it needs it, where there is none."""
        return [state.get(name, self._nothing) for state in held]

    def _prepare(self, weights: list[torch.Tensor], trained: list[bool]) -> bool:
        """Make the states that kernels cannot read yet; whether there was one."""
        waiting = [
            (optimizer, weight)
            for optimizer, weight, is_trained in zip(self.optimizers, weights, trained, strict=True)
            if is_trained and not optimizer.is_ready(weight)
        ]
        for optimizer, weight in waiting:
            optimizer.prepare(weight)
        return bool(waiting)

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
            with torch.no_grad():  # a step is not an edit that autograd should see
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
            raise self._beyond_the_end(batch) from error

    def _beyond_the_end(self, batch: TrainedBatch) -> Exception:
        """The error for a row that the forward looked up and that its table no longer has; the first table with one."""
        batch_size = (batch.offsets.numel() - 1) // len(self.table_of_feature)
        borders = batch.offsets[::batch_size].tolist()
        for feature, table in enumerate(self.table_of_feature):
            rows = batch.values[borders[feature] : borders[feature + 1]]
            last, name = batch.weights[table].shape[0] - 1, self.tables[table]
            if rows.numel() and int(rows.max()) > last:
                return IdRangeError(
                    f"the backward of table {name!r} reached row {int(rows.max())}, but its last row is {last}: since "
                    "the forward, the weight was replaced by a smaller one, or the batch was overwritten.",
                    reason="row_beyond_table",
                    module_path=name,
                    what_to_do="call backward() before the table or the batch changes. Nothing was stepped.",
                )
        return IndexError("a row was beyond the end of its table while a step began, and is no longer")
