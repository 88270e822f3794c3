"""Optimizers in backward, fused or not, as a checkpoint sees them: by the name of their parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from recfx.checkpoint.sharded_names import sharded_parameters
from recfx.collections.collection import unsharded_collections
from recfx.collections.kinds import kind_of
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import fused_optimizer_of
from recfx.optim.rules import rule_of_class
from recfx.optim.rules.rule import Rule


@dataclass(frozen=True)
class BackwardOptimizer:
    """The optimizer of one parameter.

    Args:
        name: name of the parameter in the model, followed by ``#1`` and so on if it has several optimizers.
        rule: its rule; None if no rule stands for its class.
        parameter: the parameter that it updates.
        group: its settings; the optimizer's own dict.
        state: its state; the optimizer's own dict. Empty before the first step.
        fused: its fused form, if it has one.
        optimizer_class: its class, if it has no fused form.
    """

    name: str
    rule: Rule | None
    parameter: nn.Parameter
    group: dict[str, Any]
    state: dict[str, Any]
    fused: FusedOptimizer | None
    optimizer_class: type = object

    @property
    def kind(self) -> str:
        """Its name in a checkpoint: that of its rule, or of its class."""
        return self.optimizer_class.__name__ if self.rule is None else self.rule.name

    def settings(self) -> dict[str, Any]:
        """The settings without the parameters."""
        return {key: value for key, value in self.group.items() if key != "params"}

    def tensors(self) -> dict[str, Tensor]:
        """The state's tensors, not copied."""
        return {key: value.detach() for key, value in self.state.items() if isinstance(value, Tensor)}

    def values(self) -> dict[str, Any]:
        """The rest of the state."""
        return {key: value for key, value in self.state.items() if not isinstance(value, Tensor)}


def optimizers_in_backward(model: nn.Module) -> list[BackwardOptimizer]:
    """Every optimizer in backward of ``model``: the fused ones of converted collections first, then the others.

    Those of sharded tables are not included, because no rank has their whole state.
    """
    found: list[BackwardOptimizer] = []
    fused_parameters = set(sharded_parameters(model))
    for path, collection in unsharded_collections(model).items():
        for table, fused in collection.fused_optimizers().items():
            weight = collection.weight(table)
            fused_parameters.add(id(weight))
            name = kind_of(collection).weight_name(path, table)
            found.append(BackwardOptimizer(name, fused.rule, weight, fused.group, fused.state, fused))
    for name, parameter in model.named_parameters():
        if id(parameter) in fused_parameters:
            continue
        for number, optimizer in enumerate(attached_optimizers(parameter)):
            rule = rule_of_class(type(optimizer))
            group, state = {}, {}
            full_name = f"{name}#{number}" if number else name
            if hasattr(optimizer, "param_groups"):
                group, state = optimizer.param_groups[0], optimizer.state[parameter]
            elif parameter.dim() == 2:  # one of TorchRec's placeholders, which a conversion would fuse
                form = fused_optimizer_of(parameter, name)
                if isinstance(form, FusedOptimizer):
                    found.append(BackwardOptimizer(full_name, form.rule, parameter, form.group, form.state, form))
                    continue
            found.append(BackwardOptimizer(full_name, rule, parameter, group, state, None, type(optimizer)))
    return found
