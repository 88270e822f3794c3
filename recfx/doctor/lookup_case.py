"""Tables and a batch on the host, and what one step of a rule makes of them, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recfx.optim.rules.rule import Rule

GROUP = {"lr": 0.1, "eps": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.01, "eta": 0.5, "momentum": 0.9}
STEPS = 3.0
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LookupCase:
    """Rows of -1, empty bags, and two features that share the first table.

    Args:
        dims: of the tables, which have seven rows and more.
        batch_size: of the two features and more.
        dtype: of the tables.
        seed: of everything that is drawn.
    """

    def __init__(self, dims: list[int], batch_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.dims, self.batch_size = dims, batch_size
        self.table_of_feature = [0, *range(len(dims))]
        self.weights = [torch.randn(7 + table, dim, generator=draw).to(dtype) for table, dim in enumerate(dims)]
        lengths = torch.randint(0, 5, (len(self.table_of_feature), batch_size), generator=draw)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
        self.borders = self.offsets[::batch_size].contiguous()  # of the features
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
        """See ``stepped``."""
        batch = (self.rows, self.offsets, self.gradients)
        return stepped(*batch, self.weights, self.table_of_feature, rule, states, is_stepped, mean, group)


def stepped(
    rows: Tensor,
    offsets: Tensor,
    gradients: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    rule: Rule,
    states: list[list[Tensor]],
    is_stepped: list[bool],
    mean: bool,
    group: Mapping[str, Any] = GROUP,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Copies of weights and states after one step of the rule's own ``update``.

    Args:
        rows, offsets, gradients, weights, table_of_feature: as for ``recfx.kernels.step.fused_step.fused_step_``.
        rule: of the optimizer.
        states: by state of the rule, then by table.
        is_stepped: of each table.
        mean: whether sums were divided by the lengths of bags.
        group: the settings of the optimizer.
    """
    new_weights, new_states = [weight.clone() for weight in weights], [[state.clone() for state in of] for of in states]
    sums = [torch.zeros(weight.shape) for weight in weights]
    touched = [torch.zeros(weight.shape[0], dtype=torch.bool) for weight in weights]
    lengths, batch_size, column = offsets.diff(), gradients.shape[0], 0
    bags = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    for feature, table in enumerate(table_of_feature):
        own, dim = (bags // batch_size == feature) & (rows >= 0), weights[table].shape[1]
        by_row = gradients[bags[own] % batch_size, column : column + dim]
        if mean:
            by_row = by_row / lengths[bags[own], None]
        sums[table].index_add_(0, rows[own], by_row)
        touched[table][rows[own]] = True
        column += dim
    for table in (table for table, is_one in enumerate(is_stepped) if is_one):
        own_rows = touched[table].nonzero().squeeze(1)
        own_states = {state.name: of[table][own_rows] for state, of in zip(rule.states, new_states, strict=True)}
        values = rule.update(weights[table][own_rows].float(), sums[table][own_rows], own_states, STEPS, group)
        new_weights[table][own_rows] = values.to(weights[table].dtype)
        for state, of in zip(rule.states, new_states, strict=True):
            of[table][own_rows] = own_states[state.name]
    return new_weights, new_states
