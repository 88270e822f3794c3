"""The definition of a rule: one frozen object with everything that is specific to one kind of optimizer.

A rule says which classes of torch and TorchRec it stands for, which of their settings a fused step supports, which
state it keeps for a table and under which names that is saved, and how one step changes the rows that a batch touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from recfx.kernels.build.tiling import RuleNeeds


@dataclass(frozen=True)
class Setting:
    """One setting that a fused step reads."""

    name: str  # in the parameter group of torch.optim's optimizer
    default: Any  # the value that TorchRec's kernels use if it is not given
    fused_params: tuple[str, ...]  # its names in TorchRec's fused_params; several if the setting is a tuple


LEARNING_RATE = Setting("lr", 0.01, ("learning_rate",))
EPS = Setting("eps", 1e-8, ("eps",))
BETAS = Setting("betas", (0.9, 0.999), ("beta1", "beta2"))
WEIGHT_DECAY = Setting("weight_decay", 0.0, ("weight_decay",))
COMMON_SETTINGS = (LEARNING_RATE, EPS, BETAS, WEIGHT_DECAY)
"""What TorchRec's ``fused_params`` may contain for any rule, though each rule follows only some of it."""

STEP = "step"
"""The name of the number of steps in an optimizer's state: one number per table."""

# Arguments of torch's classes that change nothing at these values, and that no fused step supports at other values.
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


@dataclass(frozen=True)
class StateTensor:
    """One tensor that a rule keeps for a table, float32."""

    name: str  # in the state of torch.optim's optimizer
    saved_as: str  # the name under which FBGEMM and TorchRec save it
    per_row: bool = False  # whether it is [rows, 1], saved as [rows]; otherwise it has the table's shape

    def shape(self, rows: int, dim: int) -> tuple[int, int]:
        return rows, 1 if self.per_row else dim


class StepNumbers(NamedTuple):
    """The numbers of one step, as the step functions of kernels take them (``*_triton.py`` beside the rules).

    Kernels in Triton take the first seven (``TRITON_NUMBERS``): no rule that reads the others has a step in Triton.
    """

    learning_rate: float  # with what the rule multiplies or divides it by in this step
    weight_decay: float = 0.0  # added to the gradient, times the weights
    eps: float = 0.0  # 0 if the rule has none
    first_share: float = 0.0  # of the gradient in the moving average that is the first state
    second_beta: float = 0.0  # the share of the old value in the moving average that is the second state
    second_share: float = 0.0  # the share of the squared gradient in that average
    second_correction: float = 1.0  # what the square root of that average is divided by
    first_correction: float = 1.0  # what the first state's average is divided by, if ``learning_rate`` is not
    own_decay: float = 0.0  # what the rule multiplies weights by for weight decay, if it is not added to the gradient
    momentum: float = 0.0  # the share of the old value in the first state, if that is no average


TRITON_NUMBERS = 7


State = dict[str, torch.Tensor]
"""The states of some rows, ``[n, dim]`` or ``[n, 1]``, by the names of the states."""
Group = Mapping[str, Any]
"""The settings of an optimizer, by name: its parameter group."""

ANY_MODE = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)
"""The modes that FBGEMM takes without further arguments, which all mean the same to a rule that reads none."""


@dataclass(frozen=True, eq=False)
class Rule(ABC):
    """One kind of optimizer. A rule is a constant in its own file, named after its ``name`` in capitals."""

    name: str  # in code, checkpoints and reports
    label: str  # its name in sentences
    dense_class: type[torch.optim.Optimizer]  # the optimizer of torch or TorchRec that runs it on whole tables
    placeholders: tuple[type, ...] = ()  # TorchRec's classes for it that only hold their arguments
    fused_types: tuple[EmbOptimType, ...] = ()  # TorchRec's names for it in fused_params
    settings: tuple[Setting, ...] = (LEARNING_RATE, WEIGHT_DECAY)  # those that a step reads
    start_setting: str = ""  # the setting that gives the state before a row's first step; without one, it is zero
    states: tuple[StateTensor, ...] = ()  # that it keeps for a table, in the order in which they are saved
    counts_steps: bool = False  # whether the state has a ``step``
    saves_step: bool = False  # whether TorchRec saves ``step``, which it does if the rule reads it
    decay_in_fused_params: str = ""  # why weight_decay in fused_params is refused, and what to do; "": it is accepted
    # The values of weight_decay_mode in fused_params with which FBGEMM applies weight_decay, as this rule does; its
    # default is WeightDecayMode.NONE. With others it leaves weight decay out, or means the rule in ``variants``.
    decay_modes: tuple[WeightDecayMode, ...] = ()
    variants: Mapping[WeightDecayMode, Rule] = field(default_factory=dict)
    needs: RuleNeeds | None = None  # the unified buffer of an NPU that the kernels of a fused step take; None: unknown
    # If cutting columns changes training: what the rule does in ``{blocks}``, which the sentence names, and the rule
    # that does not.
    when_cut: tuple[str, str] | None = None
    # Arguments of its classes that no other rule has, with the values that change nothing; others are refused.
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @abstractmethod
    def update(
        self, values: torch.Tensor, gradient: torch.Tensor, state: State, step: float, group: Group
    ) -> torch.Tensor:
        """The new weights of the rows that a batch touched, in float32. This is the reference for every kernel.

        Args:
            values: ``[n, dim]``, the weights of the rows.
            gradient: ``[n, dim]``, the gradient of each row, summed over the batch.
            state: the states of the rows; changed in place.
            step: the number of steps, including this one; 0 for rules that do not count steps.
            group: the settings.
        """

    def step_numbers(self, step: float, group: Group) -> StepNumbers:
        """The numbers of a step for kernels; arguments as for ``update``."""
        return StepNumbers(float(group["lr"]), float(group.get("weight_decay", 0)), float(group.get("eps", 0)))

    @property
    def classes(self) -> tuple[type, ...]:
        return self.dense_class, *self.placeholders

    @property
    def read_from_params(self) -> tuple[Setting, ...]:
        """The settings that are read from TorchRec's ``fused_params`` for it; not all of them have an effect."""
        return tuple(dict.fromkeys([*COMMON_SETTINGS, *self.settings]))

    @cached_property
    def settings_of_facts(self) -> tuple[Setting, ...]:
        """The settings that a step reads, by name, without the learning rate: see ``recfx.ir.context``."""
        return tuple(
            sorted((setting for setting in self.settings if setting.name != LEARNING_RATE.name), key=attrgetter("name"))
        )

    @cached_property
    def refused(self) -> tuple[str, ...]:
        """The settings that must be zero or False, as no fused step supports them."""
        return tuple(name for name, values in NEUTRAL.items() if not any(values) and name not in self.supported)

    @property
    def supported(self) -> tuple[str, ...]:
        """The arguments of its classes that a fused optimizer supports at any value."""
        return (*(setting.name for setting in self.settings), *filter(None, [self.start_setting]))

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return (*(state.name for state in self.states), *([STEP] if self.counts_steps else []))

    @property
    def saved_states(self) -> dict[str, str]:
        """The names of the tensors in an optimizer's state, by the names under which TorchRec saves them."""
        return {state.saved_as: state.name for state in self.states} | ({STEP: STEP} if self.saves_step else {})

    @property
    def one_dimensional(self) -> tuple[str, ...]:
        """Which of ``saved_states`` have one dimension."""
        return (*(state.saved_as for state in self.states if state.per_row), STEP)

    @property
    def has_row_state(self) -> bool:
        """Whether it keeps one number per row for all columns; if columns are cut, that is one per block of columns."""
        return any(state.per_row for state in self.states)

    def start(self, name: str, group: Group) -> float:
        """The value of a row's state ``name`` before the row's first step."""
        return 0.0 if name == STEP else float(group.get(self.start_setting, 0.0))

    def unlike_dense(self, group: Group) -> str:
        """The rule's description, if the dense rule changes rows that a batch did not touch; otherwise empty."""
        weight_decay = group.get("weight_decay", 0)
        return f"{self.name} with weight_decay={weight_decay:g}" if weight_decay else ""

    def when_columns_are_cut(self, blocks: int) -> tuple[str, str] | None:
        """How cutting columns into two or more blocks changes training, as a message and what to do about it; None if
        it does not.
        """
        if self.when_cut is None:
            return None
        effect, instead = self.when_cut
        effect = effect.format(blocks=f"each of the {blocks} column blocks")
        return (
            f"{self.label} {effect}. TorchRec's does the same, but the uncut table would train differently.",
            f"use {instead}, or do not cut columns, if training must not depend on the plan.",
        )

    def __reduce__(self) -> str:
        # Copying and unpickling give the constant itself.
        return self.name.upper()


def decayed(values: torch.Tensor, gradient: torch.Tensor, group: Group) -> torch.Tensor:
    """The gradient with weight decay as in ``torch.optim``: added to the gradient, not subtracted from the weights."""
    weight_decay = group.get("weight_decay", 0)
    return gradient + weight_decay * values if weight_decay else gradient
