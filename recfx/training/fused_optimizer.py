"""Fused optimizers: the update runs inside the lookup's backward, on the touched rows alone.

The settings and the state stay those of the ``torch.optim.Optimizer`` that ``apply_optimizer_in_backward`` hung on the
parameter: a learning-rate schedule on it is felt, and the plain model can take over again where the fused one stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import optim as distributed_optim
from torchrec.optim import rowwise_adagrad
from torchrec.optim.optimizers import SGD as TorchRecSGD
from torchrec.optim.optimizers import Adagrad as TorchRecAdagrad
from torchrec.optim.optimizers import Adam as TorchRecAdam

from recfx.errors import ConversionError

# Optimizer class -> kind. torchrec's SGD, Adagrad and Adam are placeholders that only fused kernels carry out.
KINDS: dict[type, str] = {
    torch.optim.SGD: "sgd",
    TorchRecSGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    TorchRecAdagrad: "adagrad",
    rowwise_adagrad.RowWiseAdagrad: "rowwise_adagrad",
    torch.optim.Adam: "adam",
    TorchRecAdam: "adam",
}

# Arguments that a fused update carries out, per kind. Any other argument must stand at the value below.
SUPPORTED: dict[str, frozenset[str]] = {
    "sgd": frozenset({"lr", "weight_decay"}),
    "adagrad": frozenset({"lr", "eps", "weight_decay", "initial_accumulator_value"}),
    "rowwise_adagrad": frozenset({"lr", "eps", "weight_decay", "initial_accumulator_value"}),
    "adam": frozenset({"lr", "betas", "eps", "weight_decay"}),
}
# State tensors of each kind, one row a row of the table.
STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
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
_PLACEHOLDER_DEFAULTS = {"lr": 0.01, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 0.0}


@dataclass
class FusedOptimizer:
    """The optimizer of one table, run in the lookup's backward.

    Args:
        kind: ``"sgd"``, ``"adagrad"``, ``"rowwise_adagrad"`` or ``"adam"``.
        group: the optimizer's parameter group; read at every step, so ``group["lr"]`` may change.
        state: the optimizer's state for the table: ``sum`` (Adagrad ``[rows, dim]``, row-wise ``[rows, 1]``),
            ``exp_avg`` and ``exp_avg_sq`` (Adam), ``step``.
    """

    kind: str
    group: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedOptimizer:
        # The group holds the parameter itself; a copy of a model must not hold the original's.
        group = {key: value for key, value in self.group.items() if key != "params"}
        state = {key: value.detach().clone() if torch.is_tensor(value) else value for key, value in self.state.items()}
        return FusedOptimizer(self.kind, group, state)

    def __getstate__(self) -> dict[str, Any]:
        group = {key: value for key, value in self.group.items() if key != "params"}
        return {"kind": self.kind, "group": group, "state": dict(self.state)}

    def settings(self) -> tuple[Any, ...]:
        """What must be equal for two tables to be updated by one kernel call."""
        group = self.group
        return self.kind, float(group["lr"]), group.get("eps"), group.get("betas"), group.get("weight_decay", 0)

    @property
    def moves_touched_rows_only(self) -> bool:
        """Whether the dense rule would move rows that a batch did not use (decay, Adam's moments), unlike this one."""
        return self.kind == "adam" or bool(self.group.get("weight_decay", 0))

    def named_state(self) -> dict[str, torch.Tensor]:
        """The state under FBGEMM's names: ``momentum1`` (rows, or rows x dim), ``momentum2``."""
        if self.kind == "rowwise_adagrad":
            return {"momentum1": self.state["sum"].view(-1)}
        names = {"adagrad": {"momentum1": "sum"}, "adam": {"momentum1": "exp_avg", "momentum2": "exp_avg_sq"}}
        return {ours: self.state[theirs] for ours, theirs in names.get(self.kind, {}).items()}

    def prepare(self, weight: torch.Tensor) -> None:
        """Make the state that ``weight`` needs, where it is missing or kernels could not read it.

        Raises:
            ConversionError: ``optimizer_state_shape``.
        """
        if self._is_ready(weight):
            return
        self.state.setdefault("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))
        start = float(self.group.get("initial_accumulator_value", 0.0))
        for name in STATES[self.kind]:
            shape = (weight.shape[0], 1 if self.kind == "rowwise_adagrad" else weight.shape[1])
            tensor = self.state.get(name)
            if tensor is None or (tensor.is_meta and not weight.is_meta):
                self.state[name] = torch.full(shape, start, dtype=torch.float32, device=weight.device)
            elif tensor.numel() != math.prod(shape):
                raise ConversionError(
                    f"the {self.kind} state {name!r} has shape {tuple(tensor.shape)}, the table needs {shape}.",
                    reason="optimizer_state_shape",
                    what_to_do="attach the optimizer again after changing the table's rows.",
                )
            else:
                # torch.optim gives it the table's dtype; the optimizer's own tensor stays as it is.
                self.state = {**self.state, name: tensor.to(weight.device, torch.float32).contiguous()}

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


@dataclass(frozen=True)
class NotFused:
    """Why a table's optimizer does not run in the lookup's backward."""

    reason: str
    message: str
    what_to_do: str


def fused_optimizer_of(weight: nn.Parameter) -> FusedOptimizer | NotFused | None:
    """The fused form of the optimizer in backward that hangs on ``weight``.

    Returns:
        None without one; :class:`NotFused` where it has no fused form. ``reason`` is ``unsupported_optimizer_argument``
        where the optimizer is known but an argument is not: ignoring it would train another model.
    """
    optimizers = getattr(weight, "_in_backward_optimizers", None)
    if not optimizers:
        return None
    if len(optimizers) > 1:
        return NotFused("several_optimizers", f"{len(optimizers)} optimizers run in its backward.", "attach one.")
    (optimizer,) = optimizers
    kind = KINDS.get(type(optimizer))
    if kind is None:
        return NotFused(
            "optimizer_not_fused",
            f"{type(optimizer).__name__} has no fused form; it runs on the whole table after the backward, as before.",
            f"use one of {sorted({known.__name__ for known in KINDS})} to have it fused.",
        )
    state: dict[str, Any] = {}
    if hasattr(optimizer, "param_groups"):
        group, state = optimizer.param_groups[0], optimizer.state[weight]
    else:  # torchrec.optim's placeholders hold nothing but their arguments; FBGEMM's defaults apply
        group = {**_PLACEHOLDER_DEFAULTS, **optimizer._kwargs}
    for name, value in group.items():
        if name == "params" or name in SUPPORTED[kind] or name.startswith("_"):
            continue
        if isinstance(value, torch.Tensor) or value not in NEUTRAL.get(name, (value,)):
            return NotFused(
                "unsupported_optimizer_argument",
                f"{type(optimizer).__name__}({name}={value!r}) has no fused form.",
                f"leave {name} at its default, or step this table with an ordinary optimizer instead.",
            )
    return FusedOptimizer(kind, group, state)


_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": rowwise_adagrad.RowWiseAdagrad,
    "adam": torch.optim.Adam,
}


def attach_unfused(weight: nn.Parameter, fused: FusedOptimizer) -> None:
    """Hang the dense form of a fused optimizer on ``weight``, with its settings and state, unless it has one already.

    Copies of a parameter lose their optimizer in backward; without it a plain model would quietly stop training.
    """
    attached = getattr(weight, "_in_backward_optimizers", None)
    if attached:
        state = attached[0].state.get(weight) if hasattr(attached[0], "state") else None
        if state is not None and state is not fused.state:  # another dtype: the fused state is a copy
            state.update({name: _like(value, state.get(name)) for name, value in fused.state.items()})
        return
    settings = {key: fused.group[key] for key in SUPPORTED[fused.kind] if key in fused.group}
    distributed_optim._apply_optimizer_in_backward(_CLASSES[fused.kind], [weight], settings)  # type: ignore[attr-defined]
    (optimizer,) = weight._in_backward_optimizers  # type: ignore[attr-defined]
    if fused.state:
        optimizer.state[weight] = fused.state


def _like(value: Any, old: Any) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor):
        return value.to(old.device, old.dtype)
    return value
