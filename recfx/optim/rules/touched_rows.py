"""Dense optimizers for rules that neither torch nor TorchRec can run on a whole table: TorchRec's classes only hold
arguments for FBGEMM. A fused optimizer becomes one of these when its table is plain again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from recfx.optim.rules.rule import STEP, Group, Rule


@dataclass(frozen=True, eq=False)
class TouchedRowsRule(Rule):
    """A rule whose ``dense_class`` is a ``TouchedRowsOptimizer`` of its own."""

    def __post_init__(self) -> None:
        dense_class: Any = self.dense_class
        dense_class.rule = self

    def unlike_dense(self, group: Group) -> str:
        """Always empty: both leave rows alone that a batch did not touch."""
        return ""


class TouchedRowsOptimizer(torch.optim.Optimizer):
    """Steps the rows whose gradient is not zero, as its rule does; all other rows and their state stay as they are.

    ``settings`` are those that the rule reads, by name; those that are not given have FBGEMM's defaults.
    """

    rule: Rule
    """What a step does."""

    def __init__(self, params: Any, **settings: Any) -> None:
        defaults = {setting.name: setting.default for setting in self.rule.settings}
        if self.rule.start_setting:
            defaults[self.rule.start_setting] = 0.0
        if unknown := settings.keys() - defaults.keys():
            raise TypeError(f"{type(self).__name__} has no setting {min(unknown)!r}, but {', '.join(defaults)}")
        super().__init__(params, {**defaults, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure`` computes the loss again and returns it."""
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
        for spec in rule.states:
            if spec.name not in state:
                shape = spec.shape(*weight.shape)
                state[spec.name] = torch.full(shape, rule.start(spec.name, group), dtype=weight.dtype).to(weight.device)
        step = 0.0
        if rule.counts_steps:
            state.setdefault(STEP, torch.zeros((), dtype=torch.float32, device="cpu")).add_(1)
            step = float(state[STEP])
        rows = gradient.ne(0).any(dim=1).nonzero().squeeze(1)
        exact = torch.promote_types(weight.dtype, torch.float32)
        row_states = {spec.name: state[spec.name][rows].to(exact) for spec in rule.states}
        stepped = rule.update(weight[rows].to(exact), gradient[rows].to(exact), row_states, step, group)
        weight[rows] = stepped.to(weight.dtype)
        for name, value in row_states.items():
            state[name][rows] = value.to(state[name].dtype)
