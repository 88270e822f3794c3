"""Optimizers in backward in a checkpoint: fused ones, by table, and others that are attached to a parameter.

An attached optimizer without a fused form is loaded like an ordinary one of one parameter. The optimizer of a sharded
table is described as if the table were whole; each rank reads the state of its own shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recfx.checkpoint.contents import OPTIMIZER
from recfx.checkpoint.saved_optimizers import SavedOptimizer, kind_of_class, settings_in
from recfx.checkpoint.storage import SavedFolder
from recfx.checkpoint.tables import Table, saved_state_names, tables_of
from recfx.hashing.row_move import RowMove
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules.rule import STEP


class AttachedOptimizer(NamedTuple):
    """An optimizer in backward without a fused form; the name is that of its parameter, with a number if it has two."""

    name: str
    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer


def fused_tables(model: nn.Module) -> list[tuple[Table, FusedOptimizer]]:
    """The tables that have a fused optimizer."""
    return [(table, fused) for table in tables_of(model) if table.first and (fused := table.fused) is not None]


def attached_to(model: nn.Module) -> list[AttachedOptimizer]:
    """The optimizers in backward that are not fused; TorchRec's placeholders, which have no groups, are left out."""
    fused = {id(weight) for table, _ in fused_tables(model) for weight in table.weights}
    return [
        AttachedOptimizer(f"{name}#{number}" if number else name, parameter, optimizer)
        for name, parameter in model.named_parameters()
        if id(parameter) not in fused
        for number, optimizer in enumerate(attached_optimizers(parameter))
        if getattr(optimizer, "param_groups", None)
    ]


def describe_in_backward(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is saved of the optimizers in backward by the first rank: of fused ones all but tensors.

    ``blocks``: row-wise Adagrad has one state per block of columns; these are saved one after the other.
    """
    described: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for table, fused in fused_tables(model):
        entry: dict[str, Any] = {"kind": fused.rule.name, "settings": settings_in(fused.group), "values": {}}
        entry["tensors"] = saved_state_names(table, fused.rule)
        if fused.rule.has_row_state and len(table.column_blocks) > 1:
            entry["blocks"] = list(table.column_blocks)
        described[table.weight] = entry
    for name, parameter, optimizer in attached_to(model):
        state = optimizer.state[parameter]
        of_state = {key: value.detach() for key, value in state.items() if isinstance(value, Tensor)}
        tensors.update({f"{OPTIMIZER}{name}.{key}": value for key, value in of_state.items()})
        described[name] = {
            "kind": kind_of_class(type(optimizer).__name__),
            "settings": settings_in(optimizer.param_groups[0]),
            "values": {key: value for key, value in state.items() if key not in of_state},
            "tensors": list(of_state),
        }
    return described, tensors


@dataclass
class FusedPlan:
    """What is to be done to the fused optimizer of one table, on this rank.

    Args:
        table: the table.
        fused: its rule, and its settings, which all of its shards share.
        saved: what was saved of its optimizer; None: it begins anew.
        move: where the rows go, if the table has more rows than saved.
    """

    table: Table
    fused: FusedOptimizer
    saved: SavedOptimizer | None
    move: RowMove | None

    def check(self) -> None:
        """Whether the optimizer can take what was saved.

        Raises:
            CheckpointError: ``checkpoint_mismatch``.
        """
        saved, fused, rule = self.saved, self.fused, self.fused.rule
        if saved is None:
            return
        saved.check_kind(rule.name)
        if bool(saved.settings.get("weight_decay")) != bool(fused.group.get("weight_decay")):
            raise saved.mismatch("only one of the saved optimizer and this one has a weight_decay.")
        if unsupported := FusedOptimizer(rule, {**fused.group, **saved.settings}).changed_setting():
            raise saved.mismatch(f"it was saved with {unsupported}, which has no fused form.")
        rows = self.table.spec.num_embeddings if self.move is None else self.move.saved_rows
        for state in rule.states if saved.tensors else ():
            shape = saved.shape(state.name) if state.name in saved.tensors else "missing"
            if shape != state.shape(rows, self.table.spec.embedding_dim):
                raise saved.mismatch(f"its state {state.name!r} was saved as {shape}, which does not fit the table.")

    def prepare(self) -> None:
        """Allocate the state, before anything is changed."""
        for shard, weight in zip(self.table.here, self.table.weights, strict=True):
            self.table.fused_of(shard).prepare(weight)

    def carry_out(self, folder: SavedFolder) -> None:
        tensors: Mapping[str, Tensor] = {} if self.saved is None else self.saved.tensors
        for shard in self.table.here:
            fused = self.table.fused_of(shard)
            for name in (state.name for state in fused.rule.states):
                target = fused.state[name].detach()
                if self.move is not None or name not in tensors:
                    target.fill_(fused.start(name))
                if self.saved is not None and name in tensors:
                    self.saved.read_shard(folder, name, shard, self.move, target)
            if fused.rule.counts_steps:
                fused.state[STEP].fill_(0.0 if self.saved is None else self._steps(self.saved, folder))
        if self.saved is not None:
            self.fused.group.update(self.saved.settings)

    def _steps(self, saved: SavedOptimizer, folder: SavedFolder) -> float:
        return float(saved.read(folder, STEP) if STEP in saved.tensors else saved.values.get(STEP) or 0.0)
