"""A toy optimizer: sign SGD whose steps get shorter the more gradient an element has seen. One file, as every rule."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recfx.optim.rules import RULES
from recfx.optim.rules.rule import LEARNING_RATE, Group, Rule, Setting, State, StateTensor


class SignSGD(torch.optim.Optimizer):
    """The dense optimizer: ``seen += |gradient|; weight -= lr * sign(gradient) / (floor + seen)``."""

    def __init__(self, params: Any, lr: float = 0.1, floor: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                seen = self.state[parameter].setdefault("seen", torch.zeros_like(parameter))
                seen += parameter.grad.abs()
                parameter -= group["lr"] * parameter.grad.sign() / (group["floor"] + seen)


class SignSgd(Rule):
    """The same on touched rows; the others have no gradient, so the two do not differ."""

    def update(self, values: Tensor, gradient: Tensor, state: State, step: float, group: Group) -> Tensor:
        seen = state["seen"].add_(gradient.abs())
        return values - group["lr"] * gradient.sign() / (group["floor"] + seen)


SIGN_SGD = SignSgd(
    name="sign_sgd",
    label="sign SGD",
    dense_class=SignSGD,
    settings=(LEARNING_RATE, Setting("floor", 1.0, ("floor",))),
    states=(StateTensor("seen", "momentum1"),),
)


@contextmanager
def registered(rule: Rule) -> Iterator[Rule]:
    """The rule is one of recfx's inside the block."""
    RULES.append(rule)
    try:
        yield rule
    finally:
        RULES.remove(rule)
