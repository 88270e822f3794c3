"""Optimizers in backward, fused or not, in a checkpoint: by the name of their parameter.

Saved ones are checked against those of the model first, then read into their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recfx.checkpoint import storage
from recfx.checkpoint.contents import IN_BACKWARD, mismatch
from recfx.checkpoint.saved_folder import SavedFolder
from recfx.checkpoint.settings import check_settings_fit, check_state_fits, is_number
from recfx.checkpoint.table_names import sharded_parameters
from recfx.collections.collection import unsharded_collections
from recfx.collections.kinds import kind_of
from recfx.hashing.row_move import RowMove
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import fused_optimizer_of
from recfx.optim.rules import rule_of_class
from recfx.optim.rules.rule import STEP, Rule


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


ATTACH_AS_SAVED = "attach the optimizers as they were attached when saving, or load with in_backward=False."


@dataclass
class BackwardPlan:
    """What is to be done to one optimizer.

    Args:
        optimizer: the optimizer whose state is replaced; its tensors stay the same objects, so sharers see the change.
        saved: what was saved besides the tensors.
        tensors: shapes and dtypes of the saved tensors, by name in its state.
        move: where the rows go, if the table has more rows than saved.
    """

    optimizer: BackwardOptimizer
    saved: Mapping[str, Any]
    tensors: dict[str, Tensor]
    move: RowMove | None

    def check(self) -> None:
        """Whether the optimizer can take what was saved.

        Raises:
            CheckpointError: ``checkpoint_mismatch``.
        """
        optimizer, saved = self.optimizer, self.saved
        if saved["kind"] != optimizer.kind:
            raise self._mismatch(f"the saved optimizer is {saved['kind']}, this one is {optimizer.kind}.")
        check_settings_fit(saved["settings"], optimizer.group, optimizer.name)
        if optimizer.fused is None:
            if self.move is not None and self.tensors:
                raise self._mismatch("its table has more rows than saved, and its optimizer is not fused.")
            settings = {**optimizer.group, **saved["settings"]}
            check_state_fits(
                self.tensors, saved["values"], optimizer.parameter, optimizer.optimizer_class, settings, optimizer.name
            )
            return
        self._check_keys(optimizer.fused.rule)
        if bool(saved["settings"].get("weight_decay")) != bool(optimizer.group.get("weight_decay")):
            raise self._mismatch("only one of the saved optimizer and this one has a weight_decay.")
        rows = optimizer.parameter.shape[0] if self.move is None else self.move.saved_rows
        dim = optimizer.parameter.shape[1]
        if "blocks" in saved and (not optimizer.fused.rule.has_row_state or saved["blocks"][-1][1] != dim):
            raise self._mismatch(f"its state was saved in blocks of columns {saved['blocks']}.")
        for each in optimizer.fused.rule.states if self.tensors else ():
            blocks = len(saved.get("blocks", [()])) if each.per_row else 1
            key, shape = each.name, each.shape(rows * blocks, dim)
            if key not in self.tensors or self.tensors[key].shape != shape:
                found = tuple(self.tensors[key].shape) if key in self.tensors else "missing"
                raise self._mismatch(f"its state {key!r} is {found}, but the table needs {shape}.")

    def _check_keys(self, rule: Rule) -> None:
        """Check the state that kernels read: tensors of numbers, and a count of steps."""
        values = self.saved["values"]
        for key in (each.name for each in rule.states):
            if key in values or (key in self.tensors and not self.tensors[key].dtype.is_floating_point):
                raise self._mismatch(f"its saved state {key!r} is not a tensor of floats.")
        if not is_number(self.tensors.get(STEP, values.get(STEP, 0))):
            raise self._mismatch("its saved 'step' is not a number.")

    def prepare(self) -> None:
        """Allocate the state of the fused optimizer, before anything is changed."""
        fused = self.optimizer.fused
        if fused is not None:
            fused.prepare(self.optimizer.parameter)

    def carry_out(self, folder: SavedFolder) -> None:
        """Load."""
        # The fused form has its own state if kernels could not read that of the optimizer.
        state = self.optimizer.state if self.optimizer.fused is None else self.optimizer.fused.state
        for key in [key for key in state if key not in self.tensors]:
            self._forget(state, key)
        for key, described in self.tensors.items():
            self._load(state, key, f"{IN_BACKWARD}{self.optimizer.name}.{key}", described, folder)
        state.update(self.saved["values"])
        self.load_settings()

    def load_settings(self) -> None:
        """The saved settings of the optimizer."""
        group = self.optimizer.group
        for key, value in self.saved["settings"].items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value

    def _forget(self, state: dict[str, Any], key: str) -> None:
        """Whether the saved optimizer had not taken a step yet."""
        if self.optimizer.fused is not None and isinstance(state[key], Tensor):
            state[key].fill_(self.optimizer.fused.start(key))
        else:
            del state[key]

    def _load(self, state: dict[str, Any], key: str, name: str, described: Tensor, folder: SavedFolder) -> None:
        current, fused = state.get(key), self.optimizer.fused
        own = None if self.optimizer.rule is None else self.optimizer.rule.state_named(key)
        blocks = self.saved.get("blocks") if own is not None and own.per_row else None
        shape = described.shape if blocks is None else torch.Size((described.shape[0] // len(blocks), 1))
        if not isinstance(current, Tensor) or (fused is None and current.shape != shape):
            saved = _read(folder, name, described, blocks)
            state[key] = saved if saved.dim() == 0 else saved.to(self.optimizer.parameter.device)
        elif current.shape == described.shape:
            storage.read_into(folder, {name: current.detach()})
        else:
            saved = _read(folder, name, described, blocks)
            if current.numel() == saved.numel():
                current.copy_(saved.view(current.shape))
            else:
                assert self.move is not None
                assert fused is not None
                self.move.apply(saved, current.fill_(fused.start(key)))

    def _mismatch(self, message: str) -> Exception:
        return mismatch(message, module_path=self.optimizer.name, what_to_do=ATTACH_AS_SAVED)


def _read(folder: SavedFolder, name: str, described: Tensor, blocks: Sequence[tuple[int, int]] | None) -> Tensor:
    """A saved tensor; if it has one number per row and block of columns, their mean, weighted by columns."""
    (saved,) = storage.read(folder, {name: described}).values()
    if blocks is None:
        return saved
    dim = max(right for _, right in blocks)
    mean = torch.zeros(saved.shape[0] // len(blocks), 1, dtype=saved.dtype, device="cpu")
    for part, (left, right) in zip(saved.chunk(len(blocks)), blocks, strict=True):
        mean += part * ((right - left) / dim)
    return mean
