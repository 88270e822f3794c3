"""Fused optimizers: the update runs inside the lookup's backward and changes only the touched rows.

The settings and the state remain those of the ``torch.optim.Optimizer`` that ``apply_optimizer_in_backward`` attached
to the parameter: a learning-rate schedule on it takes effect, and the plain model can continue where the fused one
stopped.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from recfx.errors import ConversionError
from recfx.kernels.build.huge_pages import full_on_huge_pages
from recfx.kernels.step.fused_step import step_touched_rows
from recfx.kernels.step.row_initialization import StateOfRows
from recfx.optim.rules.rule import STEP, Rule


@dataclass
class FusedOptimizer:
    """The optimizer of one table, run in the lookup's backward."""

    rule: Rule  # the kind of optimizer: the maths of a step, the states that it keeps and their names
    group: dict[str, Any]  # the optimizer's parameter group; read at every step, so ``group["lr"]`` may change
    state: dict[str, Any] = field(default_factory=dict)  # under torch.optim's names: the rule's states and ``step``
    # The settings that the user chose; others in ``group`` are defaults of the class. None: all were chosen.
    chosen: frozenset[str] | None = None
    left_out: float = 0.0  # the weight decay that was asked for, if FBGEMM, whose optimizer it is, does not apply it
    shard: str = ""  # fully qualified name of the weight, if it is a shard of a table; empty if it is a whole table

    # A copied parameter has no optimizer in backward, so a copy is the form of none.

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedOptimizer:
        # The group's parameter becomes the copied model's; shards of one table share a group, and so do their copies.
        group, state = copy.deepcopy(self.group, memo), copy.deepcopy(self.state, memo)
        return FusedOptimizer(self.rule, group, state, self.chosen, self.left_out, self.shard)

    def __reduce__(self) -> Any:
        # Not with the parameter, which would be saved with the optimizer in backward that hangs on it.
        group = self.without_parameter().group
        return FusedOptimizer, (self.rule, group, self.state, self.chosen, self.left_out, self.shard)

    def without_parameter(self) -> FusedOptimizer:
        """Rule and settings alone: the parameter would keep the whole table in memory."""
        return FusedOptimizer(self.rule, {key: value for key, value in self.group.items() if key != "params"})

    def is_form_of(self, optimizer: object) -> bool:
        """Whether this is the fused form of ``optimizer``. In a copy of a model, it is the form of none."""
        return False

    def refuse_other_readers(self) -> None:
        """Called when something else than lookups gives a gradient of the weight (``shard_read_elsewhere``)."""
        if self.shard:
            raise ConversionError(
                "something else than its collection has read the weight and gives it a gradient, but it is this rank's "
                "shard of a table: the gradients of the other ranks are not known here, and nothing would step it.",
                reason="shard_read_elsewhere",
                module_path=self.shard,
                what_to_do="read a copy without a gradient (weight.detach()), or leave this collection out of the "
                "plan: unsharded, such a gradient joins the table's step.",
            )

    def changed_setting(self) -> str:
        """A setting that was changed after attaching, to a value that no fused update supports; or ``""``."""
        group, rule = self.group, self.rule
        if any(map(group.get, rule.refused)):
            name = next(name for name in rule.refused if group.get(name))
            return f"{name}={group[name]!r}"
        for name, values in rule.neutral.items():
            if name in group and group[name] not in values:
                return f"{name}={group[name]!r}"
        return ""

    def settings(self) -> tuple[Any, ...]:
        """The settings that must be equal for one kernel call to update two tables."""
        group = self.group
        values = (group.get(setting.name, setting.default) for setting in self.rule.settings)
        return self.rule.name, *(float(value) if isinstance(value, torch.Tensor) else value for value in values)

    @property
    def facts(self) -> tuple[str, tuple[tuple[str, Hashable], ...]]:
        """The facts by which kernels are chosen: the rule and the settings of a step, without the learning rate."""
        rule, group = self.rule, self.group
        read = [(setting.name, group.get(setting.name, setting.default)) for setting in rule.settings_of_facts]
        return rule.name, tuple([(name, _as_data(value)) for name, value in read])

    def start(self, name: str) -> float:
        """The value of a row's state ``name`` before the row's first step."""
        return self.rule.start(name, self.group)

    def starts(self) -> dict[str, float]:
        """The value of each state of a row before the row's first step, by the names under which states are saved."""
        return {saved_as: self.start(name) for saved_as, name in self.rule.saved_states.items()}

    def named_state(self) -> dict[str, torch.Tensor]:
        """Views of the state under TorchRec's names: ``momentum1`` ([rows] or [rows, dim]) and so on."""
        state = {saved_as: self.state[name] for saved_as, name in self.rule.saved_states.items()}
        one_dimensional = self.rule.one_dimensional
        return {name: tensor.view(-1) if name in one_dimensional else tensor for name, tensor in state.items()}

    def dense_state(self, weight: torch.Tensor) -> dict[str, Any]:
        """The state as torch.optim keeps and reads it: in the table's dtype, on its device. A count stays as it is."""
        return {
            name: value if name == STEP else value.to(weight.device, weight.dtype) for name, value in self.state.items()
        }

    def step(self, weight: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Step the touched ``rows`` in place, with the rule's own maths; the gradients of a repeated row are summed.
        ``prepare`` must have been called.
        """
        rule, state, step = self.rule, self.state, 0.0
        if rule.counts_steps:
            state[STEP] += 1
            step = float(state[STEP])
        update = partial(rule.update, step=step, group=self.group)
        step_touched_rows(update, weight, rows, gradient, {spec.name: state[spec.name] for spec in rule.states})

    def prepare(self, weight: torch.Tensor) -> None:
        """Create the state that ``weight`` needs if it is missing or kernels cannot read it."""
        if self.is_ready(weight):
            return
        if self.rule.counts_steps:
            self.state.setdefault(STEP, torch.tensor(0.0, dtype=torch.float32, device="cpu"))
        for spec in self.rule.states:
            name, shape = spec.name, spec.shape(*weight.shape)
            tensor = self.state.get(name)
            if tensor is None or (tensor.is_meta and not weight.is_meta):
                self.state[name] = full_on_huge_pages(shape, self.start(name), weight.device)
            elif tensor.numel() != math.prod(shape):
                raise ConversionError(
                    f"the {self.rule.name} state {name!r} has shape {tuple(tensor.shape)}, the table needs {shape}.",
                    reason="optimizer_state_shape",
                    what_to_do="attach the optimizer again after changing the table's rows.",
                )
            else:
                self.state[name] = tensor.to(weight.device, torch.float32).contiguous().resolve_neg()

    def reset_rows(self, rows: torch.Tensor) -> None:
        """Reset the state of ``rows``, which now belong to new ids."""
        for state in self.states_of_rows():
            state.tensor.index_fill_(0, rows.to(state.tensor.device), state.value)

    def states_of_rows(self) -> tuple[StateOfRows, ...]:
        """What ``reset_rows`` resets: the states that are there already, and what their rows begin with."""
        states = [(self.state.get(spec.name), self.start(spec.name)) for spec in self.rule.states]
        return tuple(StateOfRows(tensor, value) for tensor, value in states if tensor is not None)

    def is_ready(self, weight: torch.Tensor) -> bool:
        """Whether kernels can address every state: as float32 rows on the weight's device, contiguous, not negated."""
        for spec in self.rule.states:
            tensor = self.state.get(spec.name)
            if (
                tensor is None
                or tensor.dtype != torch.float32
                or tensor.device != weight.device
                or tensor.shape[0] != weight.shape[0]
                or not tensor.is_contiguous()
                or tensor.is_neg()
            ):
                return False
        return not self.rule.counts_steps or STEP in self.state


def _as_data(setting: Any) -> Hashable:
    """The value of a setting; torch takes tensors for numbers, and files have lists for tuples."""
    if isinstance(setting, torch.Tensor):
        return float(setting)
    return tuple(setting) if isinstance(setting, list) else setting


class AttachedOptimizer(FusedOptimizer):
    """The fused form of the optimizer that ``apply_optimizer_in_backward`` attached to a weight.

    Settings and state are read from that optimizer each time, because its ``load_state_dict`` replaces these objects.
    All fused forms of one optimizer have the same state: collections that share a table train it together. The state of
    a table in half precision is float32 as well, which kernels need.
    """

    def __init__(
        self, rule: Rule, optimizer: torch.optim.Optimizer, weight: torch.Tensor, chosen: frozenset[str]
    ) -> None:
        self._optimizer, self._weight = optimizer, weight
        self.rule, self.chosen, self.left_out, self.shard = rule, chosen, 0.0, ""

    @property
    def group(self) -> dict[str, Any]:  # type: ignore[override]  # nobody replaces it
        return self._optimizer.param_groups[0]

    @property
    def state(self) -> dict[str, Any]:  # type: ignore[override]  # nobody replaces it
        return self._optimizer.state[self._weight]

    def prepare(self, weight: torch.Tensor) -> None:
        super().prepare(weight)
        if weight.dtype != torch.float32 and not has_own_hook(self._optimizer):
            self._optimizer.register_step_pre_hook(_in_dtype_of_table)

    def is_form_of(self, optimizer: object) -> bool:
        return optimizer is self._optimizer


def _in_dtype_of_table(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    """Before an optimizer steps a table that is not in float32 by itself: torch.optim needs its state in that dtype."""
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if name != STEP and isinstance(value, torch.Tensor):
                state[name] = value.to(weight.dtype)


def has_own_hook(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused form has put its hook before the optimizer's steps."""
    return _in_dtype_of_table in optimizer._optimizer_step_pre_hooks.values()


def groups_of(optimizers: Sequence[FusedOptimizer]) -> list[dict[str, Any]]:
    """The ``group`` of each. Every step asks for all tables, in its forward and in its backward."""
    return [
        optimizer._optimizer.param_groups[0] if type(optimizer) is AttachedOptimizer else optimizer.group
        for optimizer in optimizers
    ]


class CheckedSettings:
    """Finds the settings of a lookup's optimizers that no fused update supports; one comparison tells if all are as
    they were when they were right.
    """

    _right: list[Any] | None = None
    _read: Callable[[dict[str, Any]], Any] = itemgetter("lr")  # what must stay, and what must be there
    _are_there: Callable[[dict[str, Any]], Any] = itemgetter("lr")

    def changed(self, optimizers: Sequence[FusedOptimizer]) -> list[tuple[int, str]]:
        """The positions of those that have a ``changed_setting``, and that setting. Every batch asks for all tables."""
        groups = groups_of(optimizers)
        try:
            list(map(self._are_there, groups))  # if none has gone, and there are as many, none is new
            if self._right == [*map(len, groups), *map(self._read, groups)]:
                return []
        except (KeyError, RuntimeError):  # or a setting is a tensor of several numbers
            pass
        settings = map(FusedOptimizer.changed_setting, optimizers)
        found = [(position, changed) for position, changed in enumerate(settings) if changed]
        self._right = None
        if groups and not found and all(groups[0].keys() == group.keys() for group in groups):
            supported = {"params", *optimizers[0].rule.supported} & groups[0].keys()
            names = groups[0].keys() - supported
            if names and not any(isinstance(group[name], torch.Tensor) for group in groups for name in names):
                self._read, self._are_there = itemgetter(*names), itemgetter("lr", *supported)
                self._right = [*map(len, groups), *map(self._read, groups)]
        return found
