"""Fused optimizers: the update runs inside the lookup's backward, on the touched rows alone.

The settings and the state stay those of the ``torch.optim.Optimizer`` that ``apply_optimizer_in_backward`` hung on the
parameter: a learning-rate schedule on it is felt, and the plain model can take over again where the fused one stopped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from recfx.errors import ConversionError

# State tensors of each kind, one row a row of the table.
STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
# What is saved of each, by FBGEMM's name. Adam alone reads its count of steps.
SAVED_STATES: dict[str, dict[str, str]] = {
    "sgd": {},
    "adagrad": {"momentum1": "sum"},
    "rowwise_adagrad": {"momentum1": "sum"},
    "adam": {"momentum1": "exp_avg", "momentum2": "exp_avg_sq", "step": "step"},
}


# Arguments of torch.optim's that make another rule of each kind, if they are not zero or False.
_WITHOUT_FUSED_FORM = ("momentum", "maximize", "lr_decay", "amsgrad", "decoupled_weight_decay", "nesterov")


@dataclass
class FusedOptimizer:
    """The optimizer of one table, run in the lookup's backward.

    Args:
        kind: ``"sgd"``, ``"adagrad"``, ``"rowwise_adagrad"`` or ``"adam"``.
        group: the optimizer's parameter group; read at every step, so ``group["lr"]`` may change.
        state: the optimizer's state for the table: ``sum`` (Adagrad ``[rows, dim]``, row-wise ``[rows, 1]``),
            ``exp_avg`` and ``exp_avg_sq`` (Adam), ``step``.
        given: the settings that somebody chose; all others in ``group`` are defaults of the optimizer's class. None:
            all were chosen.
    """

    kind: str
    group: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)
    given: frozenset[str] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedOptimizer:
        # The group holds the parameter itself; a copy of a model must not hold the original's.
        # Shards of one table share theirs, and so do the shards' copies.
        group = memo.setdefault(id(self.group), {key: value for key, value in self.group.items() if key != "params"})
        state = {key: value.detach().clone() if torch.is_tensor(value) else value for key, value in self.state.items()}
        return FusedOptimizer(self.kind, group, state, self.given)

    def __getstate__(self) -> dict[str, Any]:
        group = {key: value for key, value in self.group.items() if key != "params"}
        return {"kind": self.kind, "group": group, "state": dict(self.state), "given": self.given}

    def is_form_of(self, optimizer: object) -> bool:
        """Whether this updates in the place of ``optimizer``; that of a copy does so for none."""
        return False

    def changed_setting(self) -> str:
        """A setting that has been given a value which no fused update carries out, since it was attached; or ``""``."""
        group = self.group
        return next((f"{name}={group[name]!r}" for name in _WITHOUT_FUSED_FORM if group.get(name)), "")

    def settings(self) -> tuple[Any, ...]:
        """What must be equal for two tables to be updated by one kernel call."""
        group = self.group
        return self.kind, float(group["lr"]), group.get("eps"), group.get("betas"), group.get("weight_decay", 0)

    @property
    def differs_from_dense_rule(self) -> bool:
        """Whether the dense rule would move rows that a batch did not use (decay, Adam's moments), unlike this one."""
        return self.kind == "adam" or bool(self.group.get("weight_decay", 0))

    @property
    def start(self) -> float:
        """What a row's state is before its first step."""
        return float(self.group.get("initial_accumulator_value", 0.0))

    def named_state(self) -> dict[str, torch.Tensor]:
        """Views of the state under FBGEMM's names: ``momentum1`` (rows, or rows x dim), ``momentum2``, ``step`` (1)."""
        state = {name: self.state[theirs] for name, theirs in SAVED_STATES[self.kind].items()}
        return {name: tensor.view(-1) if name in self.one_dimensional else tensor for name, tensor in state.items()}

    @property
    def one_dimensional(self) -> tuple[str, ...]:
        """Which of the saved states have one dimension."""
        return ("momentum1", "step") if self.kind == "rowwise_adagrad" else ("step",)

    def prepare(self, weight: torch.Tensor) -> None:
        """Make the state that ``weight`` needs, where it is missing or kernels could not read it.

        Raises:
            ConversionError: ``optimizer_state_shape``.
        """
        if self._is_ready(weight):
            return
        self.state.setdefault("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))
        for name in STATES[self.kind]:
            shape = (weight.shape[0], 1 if self.kind == "rowwise_adagrad" else weight.shape[1])
            tensor = self.state.get(name)
            if tensor is None or (tensor.is_meta and not weight.is_meta):
                self.state[name] = torch.full(shape, self.start, dtype=torch.float32, device=weight.device)
            elif tensor.numel() != math.prod(shape):
                raise ConversionError(
                    f"the {self.kind} state {name!r} has shape {tuple(tensor.shape)}, the table needs {shape}.",
                    reason="optimizer_state_shape",
                    what_to_do="attach the optimizer again after changing the table's rows.",
                )
            else:
                # torch.optim gives it the table's dtype; the optimizer's own tensor stays as it is.
                self.state = {**self.state, name: tensor.to(weight.device, torch.float32).contiguous()}

    def reset_rows(self, rows: torch.Tensor) -> None:
        """Forget what is held for ``rows``: they belong to new ids."""
        for name in STATES[self.kind]:
            tensor = self.state.get(name)
            if tensor is not None and not tensor.is_meta:
                tensor.index_fill_(0, rows.to(tensor.device), self.start)

    def _is_ready(self, weight: torch.Tensor) -> bool:
        """Whether every state is what kernels address it as: contiguous float32 rows beside the weight."""
        if self.kind == "sgd":
            return True
        for name in STATES[self.kind]:
            tensor = self.state.get(name)
            if (
                tensor is None
                or tensor.dtype != torch.float32
                or tensor.device != weight.device
                or tensor.shape[0] != weight.shape[0]
                or not tensor.is_contiguous()
            ):
                return False
        return "step" in self.state


class AttachedOptimizer(FusedOptimizer):
    """The fused form of an optimizer that ``apply_optimizer_in_backward`` hung on a parameter.

    Settings and state are read from that optimizer each time: its ``load_state_dict`` puts other objects in place.

    Args:
        kind: as above.
        optimizer: of one parameter.
        weight: that parameter.
        given: as above.
    """

    def __init__(
        self, kind: str, optimizer: torch.optim.Optimizer, weight: torch.Tensor, given: frozenset[str]
    ) -> None:
        self._optimizer, self._weight = optimizer, weight
        self._theirs = self._ours = optimizer.state[weight]
        self.kind, self.given = kind, given

    @property
    def group(self) -> dict[str, Any]:
        """The optimizer's parameter group."""
        return self._optimizer.param_groups[0]

    @group.setter
    def group(self, group: dict[str, Any]) -> None:
        self._optimizer.param_groups[0] = group

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's own, or what ``prepare`` made of it for the kernels."""
        theirs = self._optimizer.state[self._weight]
        if theirs is not self._theirs:
            self._theirs = self._ours = theirs
        return self._ours

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._ours = state

    def is_form_of(self, optimizer: object) -> bool:
        """Whether this updates in the place of ``optimizer``."""
        return optimizer is self._optimizer

    def __reduce__(self) -> Any:
        group = {key: value for key, value in self.group.items() if key != "params"}
        return FusedOptimizer, (self.kind, group, dict(self.state), self.given)
