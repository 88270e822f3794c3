"""Batches whose rows are stepped, and tables with random states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from recfx.kernels.lookup.embedding_bag import row_gradients
from recfx.kernels.step.fused_step import step_touched_rows
from recfx.optim.rules import RULES
from recfx.optim.rules.rule import Rule

RULE = {rule.name: rule for rule in RULES}
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "adagrad": {"lr": 0.1, "eps": 1e-3},
    "rowwise_adagrad": {"lr": 0.1, "eps": 1e-3},
    "rowwise_adagrad_decoupled": {"lr": 0.1, "eps": 1e-3},
    "adam": {"lr": 0.1, "eps": 1e-3, "betas": (0.9, 0.99)},
    "partial_rowwise_adam": {"lr": 0.1, "eps": 1e-3, "betas": (0.9, 0.99)},
    "lamb": {"lr": 0.1, "eps": 1e-3, "betas": (0.9, 0.99)},
    "partial_rowwise_lamb": {"lr": 0.1, "eps": 1e-3, "betas": (0.9, 0.99)},
    "lars_sgd": {"lr": 0.1, "eta": 0.5, "momentum": 0.9},
}
STEP = 3.0


@dataclass
class Case:
    """A batch, and tables with random states."""

    rule: Rule
    group: dict[str, Any]
    weights: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    table_of_feature: list[int]
    rows: torch.Tensor
    offsets: torch.Tensor
    gradients: torch.Tensor
    mean: bool
    scale: torch.Tensor | None
    unpooled: bool = False
    unused: tuple[int, ...] = ()  # features without a gradient

    def arguments(self) -> tuple[Any, ...]:
        first, second = (*self.states, [], [])[:2]
        numbers = [float(number) for number in self.rule.step_numbers(STEP, self.group)] * len(self.weights)
        where = (self.rows, self.offsets, self.of_outputs(), self.weights, first, second, self.table_of_feature)
        return (*where, [True] * len(self.weights), self.rule.name, numbers, self.mean, self.scale, None, self.unpooled)

    def of_outputs(self) -> list[torch.Tensor | None]:
        """``gradients`` has as many columns as the widest table if rows are not pooled."""
        if not self.unpooled:
            return [self.gradients]
        pieces = self.gradients.split(self.offsets.diff().tolist())
        widths = [self.weights[table].shape[1] for table in self.table_of_feature]
        of_features = [piece[:, :width].contiguous() for piece, width in zip(pieces, widths, strict=True)]
        return [None if number in self.unused else part for number, part in enumerate(of_features)]

    def copy(self) -> Case:
        weights = [weight.clone() for weight in self.weights]
        states = [[state.clone() for state in of_tables] for of_tables in self.states]
        return Case(**{**self.__dict__, "weights": weights, "states": states})

    def step_by_reference(self) -> None:
        batch_size = (self.offsets.numel() - 1) // len(self.table_of_feature)
        columns = [self.weights[table].shape[1] for table in self.table_of_feature]
        pooling = "NONE" if self.unpooled else "MEAN" if self.mean else "SUM"
        parts = self.offsets.diff().tolist() if self.unpooled else columns
        parts_of_tables: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for feature, gradient in enumerate(self.gradients.split(parts, dim=0 if self.unpooled else 1)):
            bags = self.offsets[feature * batch_size : (feature + 1) * batch_size + 1]
            if feature in self.unused:
                continue
            ids = slice(int(bags[0]), int(bags[-1]))
            scale = None if self.scale is None else self.scale[ids]
            gradient = gradient[:, : columns[feature]]
            by_row = row_gradients(gradient, self.rows[ids], bags - bags[0], pooling, scale)[1]
            present = self.rows[ids] >= 0
            part = (self.rows[ids][present], by_row[present])
            parts_of_tables.setdefault(self.table_of_feature[feature], []).append(part)
        update = partial(self.rule.update, step=STEP, group=self.group)
        for table, parts in parts_of_tables.items():
            state = {kind.name: of_tables[table] for kind, of_tables in zip(self.rule.states, self.states, strict=True)}
            rows, gradient = (torch.cat(list(tensors)) for tensors in zip(*parts, strict=True))
            step_touched_rows(update, self.weights[table], rows, gradient, state)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.weights, *(state for of_tables in self.states for state in of_tables)]


def case(
    rule: str = "adagrad",
    dtype: torch.dtype = torch.float32,
    rows: tuple[int, ...] = (50, 1, 300),
    dims: tuple[int, ...] = (8, 5, 64),
    features: tuple[int, ...] = (1, 2, 1),
    batch_size: int = 7,
    longest: int = 5,
    mean: bool = False,
    weighted: bool = False,
    weight_decay: float = 0.0,
    absent: float = 0.0,
    unpooled: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    group = {**SETTINGS[rule], "weight_decay": weight_decay}
    weights = [torch.randn(n, dim, generator=generator).to(dtype) for n, dim in zip(rows, dims, strict=True)]
    states = [
        [torch.rand(state.shape(*weight.shape), generator=generator) for weight in weights]
        for state in RULE[rule].states
    ]
    table_of_feature = [table for table, count in enumerate(features) for _ in range(count)]
    lengths = torch.randint(0, longest + 1, (len(table_of_feature), batch_size), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
    parts = [
        torch.randint(rows[table], (int(lengths[feature].sum()),), generator=generator)
        for feature, table in enumerate(table_of_feature)
    ]
    values = torch.cat([*parts, torch.zeros(0, dtype=torch.int64)])
    values[torch.rand(values.numel(), generator=generator) < absent] = -1
    scale = torch.randn(values.numel(), generator=generator) if weighted else None
    shape = (values.numel(), max(dims)) if unpooled else (batch_size, sum(dims[table] for table in table_of_feature))
    gradients = torch.randn(shape, generator=generator)
    offsets = offsets[:: max(batch_size, 1)] if unpooled else offsets
    where = (table_of_feature, values, offsets, gradients)
    return Case(RULE[rule], group, weights, states, *where, mean, scale, unpooled)
