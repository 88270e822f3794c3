"""What a checkpoint has of optimizers: settings and state by the name of a parameter, whatever runs its step.

What an optimizer in backward has saved, fused or attached to a parameter, an ordinary one takes, and the other way
round. The state of a sharded table is stored as that of a whole one, of which each rank writes and reads its shards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recfx.checkpoint.contents import OPTIMIZER, check_storable, mismatch
from recfx.checkpoint.storage import Parts, SavedFolder
from recfx.checkpoint.tables import Table, read_rows, tables_of
from recfx.checkpoint.wrapped_optimizers import not_supported
from recfx.errors import CheckpointError
from recfx.hashing.row_move import RowMove
from recfx.ir.tables import Shard
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules import RULES
from recfx.optim.rules.rule import STEP

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


# The optimizers of a model


def fused_tables(model: nn.Module) -> list[tuple[Table, FusedOptimizer]]:
    """The tables that have a fused optimizer."""
    return [(table, fused) for table in tables_of(model) if table.first and (fused := table.fused) is not None]


def attached_to(model: nn.Module) -> list[tuple[str, nn.Parameter, torch.optim.Optimizer]]:
    """The optimizers in backward without a fused form, with their parameters and the names of these (with a number if
    one has several); TorchRec's placeholders, which have no groups, are left out.
    """
    fused = {id(weight) for table, _ in fused_tables(model) for weight in table.weights}
    return [
        (f"{name}#{number}" if number else name, parameter, optimizer)
        for name, parameter in model.named_parameters()
        if id(parameter) not in fused
        for number, optimizer in enumerate(attached_optimizers(parameter))
        if getattr(optimizer, "param_groups", None)
    ]


class Stepped(NamedTuple):
    """A parameter that an optimizer updates; its name is ``#<number>`` if the model lacks it."""

    parameter: Tensor
    name: str
    shard: tuple[Table, Shard] | None = None


def stepped_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Stepped]:
    """The parameters of all groups, in the order in which ``state_dict`` numbers them."""
    known = {id(parameter): Stepped(parameter, name) for name, parameter in model.named_parameters()}
    for table in tables_of(model):
        if table.first and table.module.is_sharded:
            for shard, weight in zip(table.here, table.weights, strict=True):
                known[id(weight)] = Stepped(weight, table.weight, (table, shard))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [known.get(id(one), Stepped(one, f"#{number}")) for number, one in enumerate(parameters)]


# Saving


class Described(NamedTuple):
    """What this rank saves of optimizers: by name, tensors and its parts of others; and all that is no tensor."""

    settings: dict[str, Any]
    tensors: dict[str, Tensor | Parts]


def describe_in_backward(model: nn.Module, is_first: bool) -> Described:
    """The optimizers in backward; ``is_first``: whether this rank saves what is not sharded.

    ``blocks``: row-wise Adagrad has one state per block of columns; these are saved one after the other.
    """
    described = Described({}, {})
    for table, fused in fused_tables(model):
        names = list(fused.rule.tensor_names)
        if not table.module.is_sharded:  # it has no state before its first step
            names = [name for name in names if name in table.fused_of(table.here[0]).state]
        entry: dict[str, Any] = {"kind": fused.rule.name, "settings": settings_in(fused.group)}
        entry |= {"values": {}, "tensors": names}
        blocks = table.placed.column_blocks
        if fused.rule.has_row_state and len(blocks) > 1:
            entry["blocks"] = list(blocks)
        described.settings[table.weight] = entry
        per_row = {state.name for state in fused.rule.states if state.per_row}
        for shard in table.saved_here if table.module.is_sharded or is_first else ():
            for name in names:
                value = torch.as_tensor(table.fused_of(shard).state[name]).detach()
                value = value.reshape(() if name == STEP else (value.shape[0], math.prod(value.shape[1:])))
                _add_part(described, f"{OPTIMIZER}{table.weight}.{name}", value, table, shard, name in per_row)
    for name, parameter, optimizer in attached_to(model):
        described.settings[name] = {
            "kind": kind_of_class(type(optimizer).__name__),
            "settings": settings_in(optimizer.param_groups[0]),
            **_add_state(described, Stepped(parameter, name), optimizer.state[parameter], is_first),
        }
    return described


def describe_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, is_first: bool) -> Described:
    """An ordinary optimizer; ``is_first`` as above."""
    stepped = stepped_by(optimizer, model)
    foreign = [number for number, parameter in enumerate(stepped) if parameter.name == f"#{number}"]
    if foreign:
        raise not_supported(
            f"optimizer= updates {len(foreign)} parameters that the model lacks; the first is its number {foreign[0]}.",
            "pass an optimizer of parameters of this model; save other optimizers with torch.save.",
        )
    saved, described = _state_dict(optimizer), Described({"kind": type(optimizer).__name__}, {})
    described.settings["groups"] = [
        {**group, "params": [stepped[number].name for number in group["params"]]} for group in saved["param_groups"]
    ]
    described.settings["state"] = {
        stepped[number].name: _add_state(described, stepped[number], state, is_first)
        for number, state in saved["state"].items()
    }
    return described


def _state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state without a warm-up's, which it keeps for a parameter that is not the optimizer's: it has no number."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    whole = optimizer.state
    optimizer.state = defaultdict(dict, {tensor: state for tensor, state in whole.items() if id(tensor) in stepped})
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = whole


def _add_state(described: Described, stepped: Stepped, state: Mapping[str, Any], is_first: bool) -> dict[str, Any]:
    """Add the tensors of a state, and return the rest, with their names."""
    tensors = {key: value.detach() for key, value in state.items() if isinstance(value, Tensor)}
    for key, tensor in tensors.items():
        name = f"{OPTIMIZER}{stepped.name}.{key}"
        if stepped.shard is not None:
            _add_part(described, name, tensor, *stepped.shard)
        elif is_first:
            check_storable(name, tensor)
            described.tensors[name] = tensor
    return {"values": {key: value for key, value in state.items() if key not in tensors}, "tensors": list(tensors)}


def _add_part(
    described: Described, name: str, value: Tensor, table: Table, shard: Shard, per_row: bool = False
) -> None:
    """Add a shard's part of a state that is one number, cut like the weight, or a number per row and column block."""
    rows, dim, shape = table.spec.num_embeddings, table.spec.embedding_dim, tuple(value.shape)
    per_row |= shape == (shard.num_rows, 1) and shard.num_columns == dim
    if shape == ():
        described.tensors.update({name: value} if shard == table.placed.saved[0] else {})
    elif not per_row and shape != (shard.num_rows, shard.num_columns):
        raise not_supported(
            f"the state {name} of a sharded table is {shape}, its shard {(shard.num_rows, shard.num_columns)}.",
            "save such an optimizer with torch.distributed.checkpoint.",
        )
    elif shard in table.saved_here:
        size, begin = (rows, dim), (shard.rows[0], shard.columns[0])
        if per_row:
            size, begin = (len(table.placed.column_blocks) * rows, 1), (table.placed.stacked_row(shard), 0)
        parts = described.tensors.setdefault(name, Parts(size))
        assert isinstance(parts, Parts)
        parts.put(begin, value)


def join_described(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join what the ranks say about their ordinary optimizers, which update shards of different tables."""
    first = of_ranks[0]
    if any(len(of_rank["groups"]) != len(first["groups"]) for of_rank in of_ranks):
        raise not_supported(
            "optimizer= does not have the same number of groups on all ranks.", "give it the same groups on all ranks."
        )
    groups = [
        {**group, "params": list(dict.fromkeys(name for rank in of_ranks for name in rank["groups"][number]["params"]))}
        for number, group in enumerate(first["groups"])
    ]
    state = {name: entry for of_rank in reversed(of_ranks) for name, entry in of_rank["state"].items()}
    return {"kind": first["kind"], "groups": groups, "state": state}


# Reading


@dataclass(frozen=True)
class SavedOptimizer:
    """What was saved of the optimizer of one parameter."""

    name: str  # the name of the parameter, followed by ``#1`` and so on if it had several optimizers in backward
    kind: str  # the name of the optimizer's rule, or of its class if no rule stands for it
    settings: Mapping[str, Any]
    values: Mapping[str, Any]  # the part of its state that is no tensor
    names: Mapping[str, str]  # the names in the folder of the tensors of its state, by their names in the state
    folder: SavedFolder
    group: int | None = None  # the number of its group, if it was an ordinary optimizer; None if it was one in backward
    # the blocks of columns for each of which there is one number per row, if they were cut
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
        """Read a shard's part of one tensor of the state into ``target``, which has one column if there is one number
        per row; rows for which nothing was saved stay. ``move`` says where rows are now, if they are elsewhere.
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
    """All optimizers of a checkpoint."""

    # by the name of their parameter. One in backward uses up the gradient, if a parameter had two.
    entries: dict[str, SavedOptimizer]
    ordinary_kind: str  # the class of the ordinary optimizer; empty if there was none
    # the groups of the ordinary optimizer: settings, and the names of parameters as ``params``
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, settings: Mapping[str, Any], folder: SavedFolder) -> SavedOptimizers:
        """The optimizers of a checkpoint with these settings."""
        optimizer = settings["optimizer"] or {"kind": "", "groups": [], "state": {}}
        entries: dict[str, SavedOptimizer] = {}

        def add(name: str, kind: str, of: Any, state: Mapping[str, Any], **more: Any) -> None:
            names = {key: f"{OPTIMIZER}{name}.{key}" for key in state.get("tensors", ())}
            entries[name] = SavedOptimizer(name, kind, settings_in(of), state.get("values", {}), names, folder, **more)

        for number, group in enumerate(optimizer["groups"]):
            for name in group["params"]:
                state = optimizer["state"].get(name, {})
                add(name, kind_of_class(optimizer["kind"]), group, state, group=number)
        for name, entry in settings["in_backward"].items():
            add(name, entry["kind"], entry["settings"], entry, blocks=tuple(entry.get("blocks", ())))
        return cls(entries, optimizer["kind"], optimizer["groups"])
