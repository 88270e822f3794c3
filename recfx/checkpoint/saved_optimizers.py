"""What a checkpoint has of optimizers: state by the name of a parameter, whatever ran its step.

An optimizer in backward and an ordinary one are written into different parts of the files. Whatever steps a parameter
when a checkpoint is loaded takes its state, from either part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from recfx.checkpoint.contents import IN_BACKWARD, OPTIMIZER, mismatch
from recfx.checkpoint.optimizer_fits import NOT_SETTINGS, is_number
from recfx.checkpoint.sharded import read_rows
from recfx.checkpoint.storage import SavedFolder
from recfx.errors import CheckpointError
from recfx.hashing.row_move import RowMove
from recfx.ir.shard import Shard
from recfx.optim.rules import RULES
from recfx.optim.rules.rule import STEP, Rule

STEP_AS_SAVED = (
    "step it by the optimizer that stepped it when saving: attached with apply_optimizer_in_backward, which is carried "
    "out under every plan with sharders=recfx.sharders(), or in optimizer=; or load with in_backward=False and without "
    "optimizer=."
)


@dataclass(frozen=True)
class SavedOptimizer:
    """What was saved of the optimizer of one parameter.

    Args:
        name: the name of the parameter.
        kind: the name of the optimizer's rule, or of its class if no rule stands for it.
        settings: its settings.
        values: the part of its state that is no tensor.
        keys: the names of the tensors of its state.
        described: shapes and dtypes of everything that is saved.
        group: the number of its group, if it was an ordinary optimizer; None if it was one in backward.
        blocks: the blocks of columns for each of which there is one number per row, if they were cut.
    """

    name: str
    kind: str
    settings: Mapping[str, Any]
    values: Mapping[str, Any]
    keys: tuple[str, ...]
    described: Mapping[str, Tensor]
    group: int | None = None
    blocks: tuple[tuple[int, int], ...] = ()

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Shapes and dtypes of the tensors of its state, by their names in it.

        Raises:
            CheckpointError: ``checkpoint_mismatch``: one of them is not there, or not in whole blocks.
        """
        absent = [key for key in self.keys if self.saved_as(key) not in self.described]
        if absent:
            raise self.mismatch(f"the checkpoint lacks its state {absent[0]!a}.")
        tensors = {key: self.described[self.saved_as(key)] for key in self.keys}
        if self.blocks and any(tensor.dim() and tensor.shape[0] % len(self.blocks) for tensor in tensors.values()):
            raise self.mismatch(f"its state was saved in blocks of columns {list(self.blocks)}.")
        return tensors

    def shape(self, key: str) -> torch.Size:
        """The shape of what ``read`` returns."""
        shape = self.tensors[key].shape
        return torch.Size((shape[0] // len(self.blocks), 1)) if self._in_blocks(key) else shape

    def saved_as(self, key: str) -> str:
        """The name of one tensor of its state in the checkpoint."""
        return f"{IN_BACKWARD if self.group is None else OPTIMIZER}{self.name}.{key}"

    def mismatch(self, message: str) -> CheckpointError:
        return mismatch(message, module_path=self.name, what_to_do=STEP_AS_SAVED)

    def check_kind(self, kind: str) -> None:
        """Refuse another kind of optimizer than was saved: it could not go on from this state.

        Raises:
            CheckpointError: ``checkpoint_mismatch``.
        """
        if self.kind != kind:
            raise self.mismatch(f"the saved optimizer is {self.kind}, this one is {kind}.")

    def check_state_of(self, rule: Rule, rows: int, dim: int) -> None:
        """Check that the saved state is that of a table ``[rows, dim]``, as the rule keeps it.

        Raises:
            CheckpointError: ``checkpoint_mismatch``.
        """
        names = [state.name for state in rule.states]
        for key in names:
            if key in self.values or (key in self.tensors and not self.tensors[key].dtype.is_floating_point):
                raise self.mismatch(f"its saved state {key!r} is not a tensor of floats.")
        if not is_number(self.tensors.get(STEP, self.values.get(STEP, 0))):
            raise self.mismatch("its saved 'step' is not a number.")
        if self.blocks and (not rule.has_row_state or self.blocks[-1][1] != dim):
            raise self.mismatch(f"its state was saved in blocks of columns {list(self.blocks)}.")
        for state in rule.states if self.tensors else ():
            blocks = max(1, len(self.blocks)) if state.per_row else 1
            key, shape = state.name, state.shape(rows * blocks, dim)
            if key not in self.tensors or self.tensors[key].shape != shape:
                saved_shape = tuple(self.tensors[key].shape) if key in self.tensors else "missing"
                raise self.mismatch(f"its state {key!r} is {saved_shape}, but the table needs {shape}.")

    def read(self, folder: SavedFolder, key: str) -> Tensor:
        """One tensor of the state, whole; if there is one number per row and block of columns, see ``_mean``."""
        (saved,) = folder.read([self.saved_as(key)]).values()
        if not self._in_blocks(key):
            return saved
        return self._mean(list(saved.chunk(len(self.blocks))))

    def read_shard(self, folder: SavedFolder, key: str, shard: Shard, move: RowMove | None, target: Tensor) -> None:
        """Read a shard's part of one tensor of the state.

        Args:
            folder: the data folder.
            key: the name of the tensor in the state; it has one or two dimensions.
            shard: the shard.
            move: where rows are now; None if they are where they were.
            target: ``[shard's rows, shard's columns]``, or ``[shard's rows, 1]`` if there is one number per row. Rows
                for which nothing was saved stay as they are.
        """
        described, dim = self.tensors[key], shard.table.embedding_dim

        def read(part: Tensor, row: int, column: int = 0) -> Tensor:
            read_rows(folder, self.saved_as(key), described, shard, move, part, column, row)
            return part

        if not self._in_blocks(key):
            read(target, 0, shard.columns[0] if described.shape[1] == dim else 0)
            return
        rows = described.shape[0] // len(self.blocks)
        if shard.columns in self.blocks:
            read(target, self.blocks.index(shard.columns) * rows)
        else:
            target.copy_(self._mean([read(target.clone(), number * rows) for number in range(len(self.blocks))]))

    def _in_blocks(self, key: str) -> bool:
        return len(self.blocks) > 1 and self.tensors[key].dim() == 2 and self.tensors[key].shape[1] == 1

    def _mean(self, parts: list[Tensor]) -> Tensor:
        """The mean over blocks of columns of one number per row, weighted by columns."""
        mean = torch.zeros_like(parts[0])
        for part, (left, right) in zip(parts, self.blocks, strict=True):
            mean += part * ((right - left) / self.blocks[-1][1])
        return mean


@dataclass(frozen=True)
class SavedOptimizers:
    """All optimizers of a checkpoint, by the name of their parameter.

    Args:
        in_backward: those that stepped in backward.
        ordinary: those of the parameters of the ordinary optimizer.
        ordinary_kind: the class of the ordinary optimizer; empty if there was none.
        groups: the settings of the groups of the ordinary optimizer.
    """

    in_backward: dict[str, SavedOptimizer]
    ordinary: dict[str, SavedOptimizer]
    ordinary_kind: str
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, settings: Mapping[str, Any], described: Mapping[str, Tensor]) -> SavedOptimizers:
        """Those that ``read_settings`` describes, given shapes and dtypes of everything that is saved."""
        in_backward = {
            name: SavedOptimizer(
                name, entry["kind"], entry["settings"], entry["values"], tuple(entry["tensors"]), described,
                blocks=tuple(entry.get("blocks", ())),
            )
            for name, entry in settings["in_backward"].items()
        }  # fmt: skip
        optimizer = settings["optimizer"] or {"kind": "", "groups": [], "state": {}}
        groups = [
            {key: value for key, value in group.items() if key not in NOT_SETTINGS} for group in optimizer["groups"]
        ]
        kind = kind_of_class(optimizer["kind"])
        ordinary = {}
        for number, group in enumerate(optimizer["groups"]):
            for name in group["params"]:
                entry = optimizer["state"].get(name, {"values": {}, "tensors": []})
                ordinary[name] = SavedOptimizer(
                    name, kind, groups[number], entry["values"], tuple(entry["tensors"]), described, number
                )
        return cls(in_backward, ordinary, optimizer["kind"], groups)

    def get(self, name: str) -> SavedOptimizer | None:
        """What was saved of the parameter's optimizer. One in backward uses up the gradient, if it had two."""
        return self.in_backward.get(name) or self.ordinary.get(name)


def kind_of_class(name: str) -> str:
    """The kind of an ordinary optimizer: the name of the rule that its class carries out, or of the class."""
    return next((rule.name for rule in RULES if rule.dense_class.__name__ == name), name)
