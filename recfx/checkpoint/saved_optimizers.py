"""What a checkpoint has of optimizers: settings and state by the name of a parameter, whatever ran its step.

Whatever steps the parameter when the checkpoint is loaded takes them, in backward or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


def settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a group of an optimizer, without what says which parameters it updates."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def kind_of_class(name: str) -> str:
    """The kind of an ordinary optimizer: the name of the rule that its class carries out, or of the class."""
    return next((rule.name for rule in RULES if rule.dense_class.__name__ == name), name)


@dataclass(frozen=True)
class SavedOptimizer:
    """What was saved of the optimizer of one parameter.

    Args:
        name: the name of the parameter, followed by ``#1`` and so on if it had several optimizers in backward.
        kind: the name of the optimizer's rule, or of its class if no rule stands for it.
        settings: its settings.
        values: the part of its state that is no tensor.
        names: the names in the folder of the tensors of its state, by their names in the state.
        folder: the data folder.
        group: the number of its group, if it was an ordinary optimizer; None if it was one in backward.
        blocks: the blocks of columns for each of which there is one number per row, if they were cut.
    """

    name: str
    kind: str
    settings: Mapping[str, Any]
    values: Mapping[str, Any]
    names: Mapping[str, str]
    folder: SavedFolder
    group: int | None = None
    blocks: tuple[tuple[int, int], ...] = ()

    def described(self, key: str) -> Tensor:
        """Shape and dtype of one tensor of its state, as a meta tensor."""
        return self.folder.described[self.names[key]]

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of what ``read`` returns."""
        shape = tuple(self.described(key).shape)
        return (shape[0] // len(self.blocks), 1) if self._in_blocks(key) else shape

    def mismatch(self, message: str) -> CheckpointError:
        return mismatch(message, module_path=self.name, what_to_do=STEP_AS_SAVED)

    def check_kind(self, kind: str) -> None:
        """Refuse another kind of optimizer than was saved: it could not go on from this state."""
        if self.kind != kind:
            raise self.mismatch(f"the saved optimizer is {self.kind}, this one is {kind}.")

    def read(self, key: str) -> Tensor:
        """One tensor of the state, whole; if there is one number per row and block of columns, see ``_mean``."""
        (saved,) = self.folder.read([self.names[key]]).values()
        return self._mean(list(saved.chunk(len(self.blocks)))) if self._in_blocks(key) else saved

    def read_shard(self, key: str, shard: Shard, move: RowMove | None, target: Tensor) -> None:
        """Read a shard's part of one tensor of the state, which has one or two dimensions.

        Args:
            key: the name of the tensor in the state.
            shard: the shard.
            move: where rows are now; None if they are where they were.
            target: ``[shard's rows, shard's columns]``, or ``[shard's rows, 1]`` if there is one number per row. Rows
                for which nothing was saved stay as they are.
        """
        described, dim = self.described(key), shard.table.embedding_dim

        def read(part: Tensor, row: int, column: int = 0) -> Tensor:
            read_rows(self.folder, self.names[key], shard, move, part, column, row)
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
        return len(self.blocks) > 1 and self.described(key).dim() == 2 and self.described(key).shape[1] == 1

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
    def of(cls, settings: Mapping[str, Any], folder: SavedFolder) -> SavedOptimizers:
        """The optimizers of a checkpoint with these settings."""
        optimizer = settings["optimizer"] or {"kind": "", "groups": [], "state": {}}
        entries: dict[str, SavedOptimizer] = {}

        def add(
            name: str, kind: str, of: Mapping[str, Any], state: Mapping[str, Any], prefix: str, **more: Any
        ) -> None:
            names = {key: f"{prefix}{name}.{key}" for key in state.get("tensors", ())}
            entries[name] = SavedOptimizer(name, kind, settings_in(of), state.get("values", {}), names, folder, **more)

        for number, group in enumerate(optimizer["groups"]):
            for name in group["params"]:
                state = optimizer["state"].get(name, {})
                add(name, kind_of_class(optimizer["kind"]), group, state, OPTIMIZER, group=number)
        prefix = settings.get("prefix_in_backward", OPTIMIZER)
        for name, entry in settings["in_backward"].items():
            add(name, entry["kind"], entry["settings"], entry, prefix, blocks=tuple(entry.get("blocks", ())))
        return cls(entries, optimizer["kind"], optimizer["groups"])

    @property
    def ordinary(self) -> set[str]:
        """The parameters of the ordinary optimizer."""
        return {name for group in self.groups for name in group["params"]}
