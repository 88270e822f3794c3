"""Dense optimizers for rules that neither torch nor TorchRec can run on a whole table.

TorchRec has classes for these rules that only hold arguments for FBGEMM. These here run, as optimizers of plain models:
what a fused optimizer becomes when its table is plain again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from recfx.optim.rules.rule import STEP, Rule


class TouchedRowsRule(Rule):
    """A rule whose dense form is a ``TouchedRowsOptimizer``."""

    def unlike_dense(self, group: Mapping[str, Any]) -> str:
        """Always empty: both leave rows alone that a batch did not touch."""
        return ""

    def cut_columns(self, what_is_cut: str, blocks: int, instead: str) -> tuple[str, str]:
        """What ``when_columns_are_cut`` returns if each block of columns is trained as if it were a row.

        Args:
            what_is_cut: what the rule does in each block, as in "keeps one number per row in".
            blocks: the number of blocks.
            instead: the rule that does not.
        """
        message = (
            f"{self.label} {what_is_cut} each of the {blocks} column blocks. "
            "TorchRec's does the same, but the uncut table would train differently."
        )
        return message, f"use {instead}, or do not cut columns, if training must not depend on the plan."


class TouchedRowsOptimizer(torch.optim.Optimizer):
    """Steps the rows whose gradient is not zero, as the rule does it; all other rows and their state stay as they are.

    The parameters are tables ``[rows, dim]``.
    """

    @property
    @abstractmethod
    def rule(self) -> Rule:
        """What a step does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: computes the loss again and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad.to_dense(), group)
        return loss

    def _step(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        rule, state = self.rule, self.state[weight]
        for each in rule.states:
            if each.name not in state:
                shape = each.shape(*weight.shape)
                state[each.name] = torch.full(shape, rule.start(each.name, group), dtype=weight.dtype).to(weight.device)
        step = 0.0
        if rule.counts_steps:
            state.setdefault(STEP, torch.zeros((), dtype=torch.float32, device="cpu")).add_(1)
            step = float(state[STEP])
        rows = gradient.ne(0).any(dim=1).nonzero().squeeze(1)
        exact = torch.promote_types(weight.dtype, torch.float32)
        held = {each.name: state[each.name][rows].to(exact) for each in rule.states}
        stepped = rule.update(weight[rows].to(exact), gradient[rows].to(exact), held, step, group)
        weight[rows] = stepped.to(weight.dtype)
        for name, value in held.items():
            state[name][rows] = value.to(state[name].dtype)
