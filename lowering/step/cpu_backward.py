"""The backward of recfx's own lookups on the CPU: all tables of a lookup in one call, whatever the rule.

The fused step of weights that several lookups read, or several tables of one, is one call as well (``step_shared``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import pad

from recfx.errors import IdRangeError
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients
from recfx.kernels.step.fused_step import fused_step_
from recfx.lowering.registry import LookupSpec
from recfx.lowering.step.step_numbers import NumbersOfTables, StepCounts
from recfx.lowering.step.trainable_lookup import Gradients, TrainedBatch
from recfx.optim.rules.rule import Rule, StepNumbers
from recfx.optim.rules.sgd import SGD


class CpuBackward:
    """The backward of one lookup, whose tables have fused optimizers of one rule, or none."""

    def __init__(
        self, tables: Sequence[str], optimizers: Sequence[Any], table_of_feature: list[int], combine: str
    ) -> None:
        self.tables, self.optimizers, self.table_of_feature = tables, optimizers, table_of_feature
        self.mean, self.unpooled = combine == "MEAN", combine == NOT_COMBINED
        self.rule: Rule = SGD if optimizers[0] is None else optimizers[0].rule
        self.shared: tuple[Any, CpuBackward] | None = None  # see step_shared
        self._counts = StepCounts(optimizers)
        self._trained: list[bool] = []
        self._numbers = NumbersOfTables(self.rule)
        self._nothing = torch.empty(0, dtype=torch.float32, device="cpu")

    @classmethod
    def of(cls, spec: LookupSpec) -> CpuBackward:
        """The backward of the lookup ``spec``, whose weights are not kept."""
        table_of_feature = [table for table, described in enumerate(spec.tables) for _ in described.feature_names]
        names = [table.name for table in spec.tables]
        return cls(names, spec.optimizers, table_of_feature, spec.combine)

    def scale_gradient(self, batch: TrainedBatch, grad_output: torch.Tensor) -> torch.Tensor:
        try:
            with torch.no_grad():
                return per_sample_weight_gradients(
                    batch.values, batch.offsets, grad_output, batch.weights, self.table_of_feature
                )
        except IndexError as error:
            raise self._beyond_the_end(batch) from error

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
        numbers = self._numbers.of([optimizer.group for optimizer in self.optimizers], counted)
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
        self,
        batch: TrainedBatch,
        gradients: Gradients,
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
                    [None if gradient is None else gradient.contiguous() for gradient in gradients],
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
                    self.unpooled,
                )
        except IndexError as error:
            raise self._beyond_the_end(batch) from error

    def _beyond_the_end(self, batch: TrainedBatch) -> Exception:
        """The error for a row that the forward looked up and that its table no longer has; the first table with one."""
        borders = batch.offsets[:: batch.batch_size(len(self.table_of_feature))].tolist()
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


def step_shared(parts: Sequence[tuple[Any, tuple[int, ...]]]) -> bool:
    """See ``GradientPart.step_shared``. The parts are those of ``TrainableLookup``, of any target."""
    backwards = [part.trainable.backward for part, _ in parts]
    weights = {id(part.weights[table]): part.weights[table] for part, tables in parts for table in tables}
    if (
        not all(isinstance(backward, CpuBackward) for backward in backwards)
        or len({backward.rule for backward in backwards}) > 1
        or len({weight.dtype for weight in weights.values()}) > 1
    ):
        return False
    unpooled = any(backward.unpooled for backward in backwards)
    number_of = {key: number for number, key in enumerate(weights)}
    names, optimizers = [""] * len(weights), [None] * len(weights)
    for (part, tables), backward in zip(reversed(parts), reversed(backwards), strict=True):  # the first one is kept
        for table in reversed(tables):
            number = number_of[id(part.weights[table])]
            names[number], optimizers[number] = backward.tables[table], part.optimizers[table]
    join = _joined_by_id if unpooled else _joined_by_bag
    read, values, offsets, scale, gradients = join(parts)
    table_of_feature = [number_of[id(weight)] for weight in read]
    batch = TrainedBatch(list(weights.values()), values, offsets, scale)
    layout = (table_of_feature, list(map(id, optimizers)), unpooled)
    if backwards[0].shared is None or backwards[0].shared[0] != layout:  # it keeps the optimizers alive
        combine = NOT_COMBINED if unpooled else "SUM"
        backwards[0].shared = layout, CpuBackward(names, optimizers, table_of_feature, combine)
    backwards[0].shared[1].step(batch, gradients)
    return True


_Joined = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor | None, Gradients]
"""The weight that each feature reads, rows, offsets, scale, and gradients, as in ``fused_step_``."""


def _joined_by_id(parts: Sequence[tuple[Any, tuple[int, ...]]]) -> _Joined:
    """One lookup that does not pool, with the ids and gradients of all lookups, some of which may pool."""
    read = [part.weights[table] for part, tables in parts for table in tables]
    pairs = [part.of_table(table) for part, tables in parts for table in tables]
    rows, gradients = zip(*pairs, strict=True)
    borders = torch.tensor([0, *accumulate(of_table.numel() for of_table in rows)], device="cpu")
    return read, torch.cat(rows), borders, None, gradients


def _joined_by_bag(parts: Sequence[tuple[Any, tuple[int, ...]]]) -> _Joined:
    """One lookup that pools sums, with the bags and gradients of all lookups, which all pool."""
    features = [feature for part, tables in parts for feature in _features(part, tables)]
    samples = max(feature.samples for feature in features)
    with_scale = any(feature.has_scale for feature in features)
    gradients = torch.cat([feature.gradients(samples) for feature in features], dim=1)
    lengths = torch.cat([pad(feature.offsets.diff(), (0, samples - feature.samples)) for feature in features])
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    values = torch.cat([feature.rows for feature in features])
    scale = torch.cat([feature.scale() for feature in features]) if with_scale else None
    return [feature.weight for feature in features], values, offsets, scale, (gradients,)


def _features(part: Any, tables: tuple[int, ...]) -> Iterator[_Feature]:
    column = 0
    for feature, table in enumerate(part.trainable.backward.table_of_feature):
        dim = part.weights[table].shape[1]
        if table in tables:
            yield _Feature(part, feature, table, slice(column, column + dim))
        column += dim


class _Feature:
    """One feature of one lookup in one backward; ``columns`` are those of the lookup's output."""

    def __init__(self, part: Any, feature: int, table: int, columns: slice) -> None:
        batch: TrainedBatch = part.batch
        self.weight: torch.Tensor = part.weights[table]
        (gradients,) = part.gradients
        self.samples: int = gradients.shape[0]
        self.offsets = batch.offsets[feature * self.samples : (feature + 1) * self.samples + 1]
        self._ids = slice(int(self.offsets[0]), int(self.offsets[-1]))
        self.rows = batch.values[self._ids]
        self._gradients, self._scale = gradients[:, columns], batch.scale
        self._mean: bool = part.trainable.backward.mean
        self.has_scale = self._mean or self._scale is not None

    def gradients(self, samples: int) -> torch.Tensor:
        """``[samples, dim]``, with zeros for samples that this batch has not."""
        return pad(self._gradients, (0, 0, 0, samples - self.samples))

    def scale(self) -> torch.Tensor:
        """What multiplies the gradient of each id: its weight, or the share of its bag's mean."""
        if self._scale is not None:
            return self._scale[self._ids]
        if not self._mean:
            return torch.ones(self.rows.numel(), dtype=torch.float32, device="cpu")
        lengths = self.offsets.diff()
        return torch.repeat_interleave(lengths.float().reciprocal(), lengths)
