"""How saved optimizers in backward get into those of a model: checked first, then read into their own tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from recfx.checkpoint import storage
from recfx.checkpoint.in_backward import BackwardOptimizer, optimizers_in_backward
from recfx.checkpoint.names import IN_BACKWARD, check_names, mismatch
from recfx.hashing.row_move import RowMove
from recfx.training.fused_optimizer import STATES

_ATTACH_AS_SAVED = "attach the optimizers as they were attached when saving, or load with in_backward=False."


@dataclass
class BackwardPlan:
    """What is to be done to one optimizer.

    Args:
        optimizer: whose state is replaced; its tensors stay the same objects, so whoever shares them sees it.
        saved: what was saved beside the tensors.
        tensors: shapes and dtypes of the saved tensors, by name in its state.
        move: where the rows go, if the table has more rows than saved.
    """

    optimizer: BackwardOptimizer
    saved: Mapping[str, Any]
    tensors: dict[str, Tensor]
    move: RowMove | None

    def prepare(self) -> None:
        """Allocate what the fused optimizer keeps, before anything is changed."""
        fused = self.optimizer.fused
        if fused is not None:
            fused.prepare(self.optimizer.parameter)

    def carry_out(self, folder: Path) -> None:
        """Load."""
        # The fused form has a state of its own where kernels could not read the optimizer's.
        state = self.optimizer.state if self.optimizer.fused is None else self.optimizer.fused.state
        for key in [key for key in state if key not in self.tensors]:
            self._forget(state, key)
        for key, described in self.tensors.items():
            self._load(state, key, f"{IN_BACKWARD}{self.optimizer.name}.{key}", described, folder)
        state.update(self.saved["values"])
        group = self.optimizer.group
        for key, value in self.saved["settings"].items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value

    def _forget(self, state: dict[str, Any], key: str) -> None:
        """The saved optimizer had not made a step yet."""
        if self.optimizer.fused is not None and isinstance(state[key], Tensor):
            state[key].fill_(self.optimizer.fused.start if key in STATES[self.optimizer.kind] else 0)
        else:
            del state[key]

    def _load(self, state: dict[str, Any], key: str, name: str, described: Tensor, folder: Path) -> None:
        current, fused = state.get(key), self.optimizer.fused
        if not isinstance(current, Tensor) or (fused is None and current.shape != described.shape):
            (saved,) = storage.read(folder, {name: described}).values()
            state[key] = saved if saved.dim() == 0 else saved.to(self.optimizer.parameter.device)
        elif current.shape == described.shape and current.dtype == described.dtype:
            storage.read_into(folder, {name: current.detach()})
        else:
            (saved,) = storage.read(folder, {name: described}).values()
            if current.shape == saved.shape:
                current.copy_(saved)
            else:
                assert self.move is not None
                assert fused is not None
                self.move.apply(saved, current.fill_(fused.start))


def plan_in_backward(
    model: nn.Module, described: Mapping[str, Tensor], saved: Mapping[str, Any], moves: Mapping[str, RowMove]
) -> list[BackwardPlan]:
    """Check the saved optimizers against those of this model. Changes nothing.

    Args:
        model: without wrappers.
        described: shapes and dtypes of all that is saved.
        saved: kind, settings and names of the tensors of each optimizer.
        moves: of the tables that have more rows than saved, by weight name.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    optimizers = optimizers_in_backward(model)
    check_names("optimizers in backward", [each.name for each in optimizers], list(saved), _ATTACH_AS_SAVED)
    plans = []
    for optimizer in optimizers:
        entry = saved[optimizer.name]
        tensors = {key: described[f"{IN_BACKWARD}{optimizer.name}.{key}"] for key in entry["tensors"]}
        plan = BackwardPlan(optimizer, entry, tensors, moves.get(optimizer.name))
        _check(plan)
        plans.append(plan)
    return plans


def _check(plan: BackwardPlan) -> None:
    optimizer, saved = plan.optimizer, plan.saved
    if saved["kind"] != optimizer.kind:
        raise _mismatch(plan, f"the saved optimizer is {saved['kind']}, this one {optimizer.kind}.")
    if optimizer.fused is None:
        if plan.move is not None and plan.tensors:
            raise _mismatch(plan, "its table has more rows than saved, and an optimizer that is not fused.")
        return
    if bool(saved["settings"].get("weight_decay", 0)) != bool(optimizer.group.get("weight_decay", 0)):
        raise _mismatch(plan, "one of the saved optimizer and this one has a weight_decay, the other has not.")
    rows = optimizer.parameter.shape[0] if plan.move is None else plan.move.saved_rows
    shape = (rows, 1 if optimizer.kind == "rowwise_adagrad" else optimizer.parameter.shape[1])
    for key in STATES[optimizer.kind] if plan.tensors else ():
        if key not in plan.tensors or plan.tensors[key].shape != shape:
            found = tuple(plan.tensors[key].shape) if key in plan.tensors else "missing"
            raise _mismatch(plan, f"its state {key!r} is {found}, the table needs {shape}.")


def _mismatch(plan: BackwardPlan, message: str) -> Exception:
    return mismatch(message, module_path=plan.optimizer.name, what_to_do=_ATTACH_AS_SAVED)
