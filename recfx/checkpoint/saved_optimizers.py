"""What a checkpoint has of optimizers: settings and state by the name of a parameter, whatever ran its step.

Whatever steps the parameter when the checkpoint is loaded takes them, in backward or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from recfx.checkpoint.contents import OPTIMIZER, mismatch
from recfx.checkpoint.storage import SavedFolder
from recfx.checkpoint.tables import read_rows
from recfx.errors import CheckpointError
from recfx.hashing.row_move import RowMove
from recfx.ir.tables import Shard
from recfx.optim.rules import RULES

STEP_AS_SAVED = (
    "step it by the optimizer that stepped it when saving: attached with apply_optimizer_in_backward, which is carried "
    "out under every plan with sharders=recfx.sharders(), or in optimizer=; or load with in_backward=False and without "
    "optimizer=."
)
NOT_SETTINGS = ("params", "param_names")
"""Entries of an optimizer's groups that say which parameters it updates: a checkpoint has its own names for them."""


def settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a group of an optimizer."""
    return {key: value for key, value in group.items() if key not in NOT_SETTINGS}


@dataclass(frozen=True)
class SavedOptimizer:
    """What was saved of the optimizer of one parameter.

    Args:
        name: the name of the parameter, followed by ``#1`` and so on if it had several optimizers in backward.
        kind: the name of the optimizer's rule, or of its class if no rule stands for it.
        settings: its settings.
        values: the part of its state that is no tensor.
        keys: the names of the tensors of its state.
        described: shapes and dtypes of everything that is saved.
        group: the number of its group, if it was an ordinary optimizer; None if it was one in backward.
        blocks: the blocks of columns for each of which there is one number per row, if they were cut.
        prefix: what the names of its tensors begin with.
    """

    name: str
    kind: str
    settings: Mapping[str, Any]
    values: Mapping[str, Any]
    keys: tuple[str, ...]
    described: Mapping[str, Tensor]
    group: int | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    prefix: str = OPTIMIZER

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Shapes and dtypes of the tensors of its state, by their names in it."""
        return {key: self.described[self.saved_as(key)] for key in self.keys}

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of what ``read`` returns."""
        shape = tuple(self.tensors[key].shape)
        return (shape[0] // len(self.blocks), 1) if self._in_blocks(key) else shape

    def saved_as(self, key: str) -> str:
        """The name of one tensor of its state in the checkpoint."""
        return f"{self.prefix}{self.name}.{key}"

    def mismatch(self, message: str) -> CheckpointError:
        return mismatch(message, module_path=self.name, what_to_do=STEP_AS_SAVED)

    def check_kind(self, kind: str) -> None:
        """Refuse another kind of optimizer than was saved: it could not go on from this state.

        Raises:
            CheckpointError: ``checkpoint_mismatch``.
        """
        if self.kind != kind:
            raise self.mismatch(f"the saved optimizer is {self.kind}, this one is {kind}.")

    def read(self, folder: SavedFolder, key: str) -> Tensor:
        """One tensor of the state, whole; if there is one number per row and block of columns, see ``_mean``."""
        (saved,) = folder.read([self.saved_as(key)]).values()
        return self._mean(list(saved.chunk(len(self.blocks)))) if self._in_blocks(key) else saved

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
            read_rows(folder, self.saved_as(key), shard, move, part, column, row)
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
    """All optimizers of a checkpoint.

    Args:
        entries: by the name of their parameter. One in backward uses up the gradient, if a parameter had two.
        ordinary_kind: the class of the ordinary optimizer; empty if there was none.
        groups: the groups of the ordinary optimizer: settings, and the names of parameters as ``params``.
    """

    entries: dict[str, SavedOptimizer]
    ordinary_kind: str
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, settings: Mapping[str, Any], described: Mapping[str, Tensor]) -> SavedOptimizers:
        """The optimizers of a checkpoint with these settings; ``described`` has the shapes of all that is saved."""
        optimizer = settings["optimizer"] or {"kind": "", "groups": [], "state": {}}
        kind, nothing = kind_of_class(optimizer["kind"]), dict[str, Any](values={}, tensors=[])
        entries = {
            name: SavedOptimizer(
                name, kind, settings_in(group), entry["values"], tuple(entry["tensors"]), described, number
            )
            for number, group in enumerate(optimizer["groups"])
            for name in group["params"]
            for entry in [optimizer["state"].get(name, nothing)]
        }
        for name, entry in settings["in_backward"].items():
            blocks, prefix = tuple(entry.get("blocks", ())), settings.get("prefix_in_backward", OPTIMIZER)
            entries[name] = SavedOptimizer(
                name, entry["kind"], settings_in(entry["settings"]), entry["values"], tuple(entry["tensors"]),
                described, None, blocks, prefix,
            )  # fmt: skip
        return cls(entries, optimizer["kind"], optimizer["groups"])

    @property
    def ordinary(self) -> set[str]:
        """The parameters of the ordinary optimizer."""
        return {name for group in self.groups for name in group["params"]}

    def group_of(self, name: str) -> int | None:
        """The number of the group of a parameter of the ordinary optimizer."""
        return next((number for number, group in enumerate(self.groups) if name in group["params"]), None)


def kind_of_class(name: str) -> str:
    """The kind of an ordinary optimizer: the name of the rule that its class carries out, or of the class."""
    return next((rule.name for rule in RULES if rule.dense_class.__name__ == name), name)
