"""What a rule is: everything that is specific to one kind of optimizer, as one frozen object.

A rule says which classes of torch and TorchRec it stands for, which of their settings a fused step carries out, what it
keeps for a table and under which names that is saved, and how one step changes the rows that a batch touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType


@dataclass(frozen=True)
class Setting:
    """One setting that a fused step reads.

    Args:
        name: of ``torch.optim``, in an optimizer's parameter group.
        default: what TorchRec's kernels take where it is not given.
        fused_params: its names in TorchRec's ``fused_params``; several where the setting is a tuple.
    """

    name: str
    default: Any
    fused_params: tuple[str, ...]


LEARNING_RATE = Setting("lr", 0.01, ("learning_rate",))
EPS = Setting("eps", 1e-8, ("eps",))
BETAS = Setting("betas", (0.9, 0.999), ("beta1", "beta2"))
WEIGHT_DECAY = Setting("weight_decay", 0.0, ("weight_decay",))
COMMON_SETTINGS = (LEARNING_RATE, EPS, BETAS, WEIGHT_DECAY)
"""What TorchRec's ``fused_params`` may name whatever the rule; a rule reads some of them."""

STEP = "step"
"""The count of steps, in an optimizer's state: one number per table."""

# Arguments of torch's classes that change nothing at these values, and that no fused step carries out at others.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "momentum": (0, 0.0),
    "dampening": (0, 0.0),
    "nesterov": (False,),
    "maximize": (False,),
    "lr_decay": (0, 0.0),
    "amsgrad": (False,),
    "decoupled_weight_decay": (False,),
    # These choose among implementations of the same rule.
    "foreach": (None, True, False),
    "fused": (None, True, False),
    "capturable": (False, True),
    "differentiable": (False,),
}
# Those of them that make another rule as soon as they are neither zero nor False.
WITHOUT_FUSED_FORM = ("momentum", "maximize", "lr_decay", "amsgrad", "decoupled_weight_decay", "nesterov")


@dataclass(frozen=True)
class StateTensor:
    """One tensor that a rule keeps for a table, float32.

    Args:
        name: of ``torch.optim``, in an optimizer's state.
        saved_as: the name under which FBGEMM and TorchRec save it.
        per_row: it is ``[rows, 1]``, saved as ``[rows]``; otherwise it has the table's shape.
    """

    name: str
    saved_as: str
    per_row: bool = False

    def shape(self, rows: int, dim: int) -> tuple[int, int]:
        """Of the tensor for a table ``[rows, dim]``."""
        return rows, 1 if self.per_row else dim


@dataclass(frozen=True, eq=False)
class Rule(ABC):
    """One kind of optimizer. A rule is one constant of its file, called as its ``name`` in capitals.

    Args:
        name: what code, checkpoints and reports call it.
        label: what a sentence calls it.
        dense_class: the optimizer of torch or TorchRec that carries it out on whole tables.
        placeholders: TorchRec's classes for it that hold nothing but their arguments.
        fused_types: TorchRec's names of it in ``fused_params``.
        settings: which settings a step reads.
        start_setting: the setting that says what the state is before a row's first step; zero without one.
        states: what it keeps for a table, in the order in which it is saved.
        counts_steps: whether the state has a ``step``.
        saves_step: whether TorchRec saves that: where the rule reads it.
        decay_in_fused_params: why ``weight_decay`` in ``fused_params`` is refused, and what to do; empty: it is not.
    """

    name: str
    label: str
    dense_class: type[torch.optim.Optimizer]
    placeholders: tuple[type, ...] = ()
    fused_types: tuple[EmbOptimType, ...] = ()
    settings: tuple[Setting, ...] = (LEARNING_RATE, WEIGHT_DECAY)
    start_setting: str = ""
    states: tuple[StateTensor, ...] = ()
    counts_steps: bool = False
    saves_step: bool = False
    decay_in_fused_params: str = ""

    @abstractmethod
    def update(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        step: float,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """One step of the rows that a batch touched, in float32: the reference of every kernel.

        Args:
            values: ``[n, dim]`` the rows' weights.
            gradient: ``[n, dim]`` the sum over the batch of each row's gradients.
            state: by the states' names, ``[n, dim]`` or ``[n, 1]``; changed in place.
            step: how many steps there were, this one included; 0 for rules that do not count.
            group: the settings.

        Returns:
            The new weights of the rows.
        """

    @property
    def classes(self) -> tuple[type, ...]:
        """Every optimizer class that it stands for."""
        return self.dense_class, *self.placeholders

    @property
    def supported(self) -> tuple[str, ...]:
        """The arguments of its classes that a fused optimizer carries out at any value."""
        return (*(setting.name for setting in self.settings), *filter(None, [self.start_setting]))

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The tensors in an optimizer's state after a step."""
        return (*(state.name for state in self.states), *([STEP] if self.counts_steps else []))

    @property
    def saved_states(self) -> dict[str, str]:
        """Names of the tensors in an optimizer's state, by the names under which TorchRec saves them."""
        return {state.saved_as: state.name for state in self.states} | ({STEP: STEP} if self.saves_step else {})

    @property
    def one_dimensional(self) -> tuple[str, ...]:
        """Which of ``saved_states`` have one dimension."""
        return (*(state.saved_as for state in self.states if state.per_row), STEP)

    @property
    def has_row_state(self) -> bool:
        """Whether a row has a number for all its columns: under column cuts, one per block of columns."""
        return any(state.per_row for state in self.states)

    def state_named(self, name: str) -> StateTensor | None:
        """The state of that name in ``torch.optim``; None for ``step`` and names that are none of its own."""
        return next((state for state in self.states if state.name == name), None)

    def start(self, name: str, group: Mapping[str, Any]) -> float:
        """What the state ``name`` of a row is before the row's first step; 0 for what is none of its states."""
        return 0.0 if self.state_named(name) is None else float(group.get(self.start_setting, 0.0))

    def unlike_dense(self, group: Mapping[str, Any]) -> str:
        """What to call it where the dense rule moves rows that a batch did not touch, unlike this one; else empty."""
        weight_decay = group.get("weight_decay", 0)
        return f"{self.name} with weight_decay={weight_decay:g}" if weight_decay else ""

    def when_columns_are_cut(self, blocks: int) -> tuple[str, str] | None:
        """What column cuts change, as a message and what to do about it; None where they change nothing.

        Args:
            blocks: into how many blocks of columns the table is cut, two or more.
        """
        return None

    def __reduce__(self) -> str:
        # Copies and pickles are the constant itself.
        return self.name.upper()


def decayed(values: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """The gradient with weight decay as ``torch.optim`` has it: added, not taken off the weights."""
    weight_decay = group.get("weight_decay", 0)
    return gradient + weight_decay * values if weight_decay else gradient
