"""Tables and a batch on the host, and what one step of a rule makes of them, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recfx.optim.rules.rule import Rule

GROUP = {"lr": 0.1, "eps": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.01}
STEPS = 3.0
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Lookup:
    """Rows of -1, empty bags, and two features that share the first table."""

    def __init__(self, dims: list[int], batch_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.dims, self.batch_size = dims, batch_size
        self.table_of_feature = [0, *range(len(dims))]
        self.weights = [torch.randn(7 + table, dim, generator=draw).to(dtype) for table, dim in enumerate(dims)]
        lengths = torch.randint(0, 5, (len(self.table_of_feature), batch_size), generator=draw)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
        rows = [
            torch.randint(-1, self.weights[table].shape[0], (int(own.sum()),), generator=draw)
            for table, own in zip(self.table_of_feature, lengths, strict=True)
        ]
        self.rows = torch.cat(rows)
        self.scales = torch.rand(self.rows.numel(), generator=draw)
        self.gradients = torch.randn(batch_size, sum(dims) + dims[0], generator=draw)

    def stepped(
        self,
        rule: Rule,
        states: list[list[Tensor]],
        is_stepped: list[bool],
        mean: bool,
        group: Mapping[str, Any] = GROUP,
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Copies of weights and states after one step of the rule's own ``update``."""
        weights, after = [weight.clone() for weight in self.weights], [[each.clone() for each in of] for of in states]
        sums = [torch.zeros(weight.shape) for weight in self.weights]
        touched = [torch.zeros(weight.shape[0], dtype=torch.bool) for weight in self.weights]
        lengths = self.offsets.diff()
        bags = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
        column = 0
        for feature, table in enumerate(self.table_of_feature):
            own = (bags // self.batch_size == feature) & (self.rows >= 0)
            by_row = self.gradients[bags[own] % self.batch_size, column : column + self.dims[table]]
            if mean:
                by_row = by_row / lengths[bags[own], None]
            sums[table].index_add_(0, self.rows[own], by_row)
            touched[table][self.rows[own]] = True
            column += self.dims[table]
        for table in (table for table, is_one in enumerate(is_stepped) if is_one):
            rows = touched[table].nonzero().squeeze(1)
            held = {state.name: of[table][rows] for state, of in zip(rule.states, after, strict=True)}
            new = rule.update(weights[table][rows].float(), sums[table][rows], held, STEPS, group)
            weights[table][rows] = new.to(weights[table].dtype)
            for state, of in zip(rule.states, after, strict=True):
                of[table][rows] = held[state.name]
        return weights, after
