"""The backward of recfx's own lookups on the CPU: all tables of a lookup in one call, whatever the rule."""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch

from recfx.ir.node_kinds import NOT_COMBINED
from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients
from recfx.kernels.step.fused_step import fused_step_
from recfx.lowering.registry import LookupSpec
from recfx.lowering.step.trainable_lookup import Backward, changed_before_backward
from recfx.lowering.step.trained_batch import Gradients, TrainedBatch
from recfx.optim.fused_optimizer import groups_of
from recfx.optim.rules.rule import STEP, Rule, StepNumbers
from recfx.optim.rules.sgd import SGD


class CpuBackward(Backward):
    """The backward of one lookup, whose tables have fused optimizers of one rule, or none."""

    def __init__(self, spec: LookupSpec) -> None:
        super().__init__(spec)
        optimizers = spec.optimizers
        self.rule: Rule = SGD if optimizers[0] is None else optimizers[0].rule
        self._counts = StepCounts(optimizers)
        self._trained: list[bool] = []
        self._numbers = NumbersOfTables(self.rule)
        self._nothing = torch.empty(0, dtype=torch.float32, device="cpu")

    def scale_gradient(self, batch: TrainedBatch, grad_output: torch.Tensor) -> torch.Tensor:
        arguments = (batch.values, batch.offsets, grad_output, batch.weights, self.table_of_feature)
        return self._read(batch, per_sample_weight_gradients, *arguments)

    def weight_gradients(
        self, batch: TrainedBatch, gradients: Gradients, is_needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """See ``Backward``. A step of SGD from zero with learning rate -1 is the gradient."""
        totals = [
            # The operator leaves tables alone that are not needed; of those, it takes the shape.
            torch.zeros(weight.shape, dtype=torch.float32, device="cpu")
            if needed
            else torch.empty(0, weight.shape[1], dtype=torch.float32, device="cpu")
            for weight, needed in zip(batch.weights, is_needed, strict=True)
        ]
        numbers: list[float] = list(StepNumbers(-1.0)) * len(totals)
        self._run(batch, gradients, totals, [], list(is_needed), SGD.name, numbers, None)
        return [total if needed else None for total, needed in zip(totals, is_needed, strict=True)]

    def step(self, batch: TrainedBatch, gradients: Gradients) -> None:
        """See ``Backward``. Frozen tables are left alone, and so are their states."""
        trained = [weight.requires_grad for weight in batch.weights]
        if not any(trained):
            return
        try:
            self._step(batch, gradients, trained)
        except RuntimeError:
            # The operator has checked every state before it changed anything.
            if not self._prepare(batch.weights, trained):
                raise
            self._step(batch, gradients, trained)

    def step_rows(self, weight: torch.Tensor, optimizer: Any, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """See ``Backward``: the step of a lookup of this weight alone, which does not pool."""
        batch = TrainedBatch([weight], rows, torch.tensor([0, rows.numel()], device="cpu"), None)
        alone = CpuBackward(LookupSpec(self.tables[:1], NOT_COMBINED, False, [], [optimizer]))
        alone.table_of_feature = [0]
        alone.step(batch, (gradients,))

    def _step(self, batch: TrainedBatch, gradients: Gradients, trained: list[bool]) -> None:
        # Looked up anew in every step, because any state may be replaced between steps, as by a checkpoint.
        has_state = self.rule.states or self.rule.counts_steps
        kept = [optimizer.state for optimizer in self.optimizers] if has_state else []
        counts = self._counts.of(kept) if self.rule.counts_steps else None
        if self.rule.counts_steps and (counts is None or trained != self._trained):
            self._prepare(batch.weights, trained)
            kept = [optimizer.state for optimizer in self.optimizers]
            counts = self._counts.shared()
        self._trained = trained
        # An empty tensor, which the operator refuses if it needs it, where there is none.
        states = [[state.get(named.name, self._nothing) for state in kept] for named in self.rule.states]
        # Only rules that save the number of steps read it.
        counted = (counts + 1).tolist() if counts is not None and self.rule.saves_step else None
        numbers = self._numbers.of(groups_of(self.optimizers), counted)
        self._run(batch, gradients, batch.weights, states, trained, self.rule.name, numbers, counts)

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
        self, batch: TrainedBatch, gradients: Gradients, weights: list[torch.Tensor], states: list[list[torch.Tensor]],
        is_stepped: list[bool], rule: str, numbers: list[float], counts: torch.Tensor | None,
    ) -> None:  # fmt: skip
        first, second = (*states, [], [])[:2]
        given = [None if gradient is None else gradient.contiguous() for gradient in gradients]
        self._read(
            batch, fused_step_, batch.values, batch.offsets, given, weights, first, second, self.table_of_feature,
            is_stepped, rule, numbers, self.mean, batch.scale, counts, self.unpooled,
        )  # fmt: skip

    def _read(self, batch: TrainedBatch, operator: Callable[..., Any], *arguments: Any) -> Any:
        """Call an operator that reads the tables, which may have been replaced since the forward."""
        try:
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():  # a step is no edit for autograd
                return operator(*arguments)
        except IndexError as error:  # a row is beyond the end of its table, and nothing was stepped
            raise changed_before_backward(self.tables) from error
        except RuntimeError as error:
            if any(weight.is_neg() or not weight.is_contiguous() for weight in batch.weights):
                raise changed_before_backward(self.tables) from error
            raise


class StepCounts:
    """The ``step`` of all optimizers of a lookup; these are views of one tensor, so that a single addition does it."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._counts = torch.empty(0)
        self._views: list[torch.Tensor | None] = []

    def shared(self) -> torch.Tensor | None:
        """The number of steps of each table, float32 ``[tables]``; None if the rule does not count them.

        Views of it are put in the place of the optimizers' own tensors, if they are not there already.
        """
        if not self._optimizers[0].rule.counts_steps:
            return None
        steps = [optimizer.state.get(STEP) for optimizer in self._optimizers]
        if self._are_views(steps):
            return self._counts
        none = torch.zeros((), dtype=torch.float32, device="cpu")  # of a table that was never trained
        self._counts = torch.stack([none if step is None else step.detach().to(none) for step in steps])
        self._views = []
        for optimizer, step, view in zip(self._optimizers, steps, self._counts.unbind(), strict=True):
            self._views.append(None if step is None else view)
            if step is not None:
                optimizer.state[STEP] = view
        return self._counts

    def of(self, states: Sequence[dict[str, Any]]) -> torch.Tensor | None:
        """What ``shared`` returns, if it is already in the states that the optimizers hold; otherwise None."""
        return self._counts if self._are_views([state.get(STEP) for state in states]) else None

    def _are_views(self, steps: Sequence[torch.Tensor | None]) -> bool:
        return len(steps) == len(self._views) and all(map(operator.is_, steps, self._views))


class NumbersOfTables:
    """``StepNumbers`` of some tables of one rule, as one list; computed anew when a setting has changed."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._names = tuple(setting.name for setting in rule.settings)
        self._read = operator.itemgetter(*self._names)
        self._keys: list[Any] | None = None  # of settings that cannot change without being replaced
        self._numbers: list[float] = []

    def of(self, groups: Sequence[Mapping[str, Any]], steps: Sequence[float] | None) -> list[float]:
        """One table after the other, from the settings of each. The caller must not change the list.

        ``steps`` are the numbers of steps, including this one; None: the rule does not read them.
        """
        try:
            keys: list[Any] = list(map(self._read, groups))
        except KeyError:  # the update has a default for what is not there
            keys = [tuple(map(group.get, self._names)) for group in groups]
        if steps is None and keys == self._keys:
            return self._numbers
        settings: list[Any] | None = keys
        by_step = steps is not None
        keys = list(zip(keys, steps, strict=True)) if steps is not None else keys
        try:
            group_of = dict(zip(keys, groups, strict=True))
        except TypeError:  # betas are a list, if they come from a file
            keys, settings = [_hashable(key) for key in keys], None
            group_of = dict(zip(keys, groups, strict=True))
        numbers_of = {
            key: [float(number) for number in self._rule.step_numbers(key[1] if by_step else 0.0, group)]
            for key, group in group_of.items()
        }
        self._numbers = list(chain.from_iterable(map(numbers_of.__getitem__, keys)))
        self._keys = settings if not by_step and all(map(_is_constant, numbers_of)) else None
        return self._numbers


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _is_constant(value: Any) -> bool:
    """Whether it can only be replaced; a tensor may get another value."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (int, float))
