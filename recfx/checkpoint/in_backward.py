"""Optimizers in backward, fused or not, in a checkpoint: by the name of their parameter.

Saved optimizers are checked against the model's first, then read into their tensors. The optimizer of a sharded table
is described as if the table were whole; each rank reads the state of its own shards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recfx.checkpoint.contents import check_names
from recfx.checkpoint.optimizer_fits import check_settings_fit, check_state_fits
from recfx.checkpoint.saved_optimizers import STEP_AS_SAVED, SavedOptimizer, SavedOptimizers
from recfx.checkpoint.storage import SavedFolder
from recfx.checkpoint.table_names import NamedTable, sharded_parameters, sharded_tables
from recfx.collections.collection import unsharded_collections
from recfx.collections.kinds import kind_of
from recfx.hashing.row_move import RowMove
from recfx.ir.shard import Shard
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
        parameter: the parameter that it updates; on meta for a sharded table.
        group: its settings; the optimizer's own dict.
        state: its state; the optimizer's own dict. Empty before the first step, and for a sharded table.
        fused: its fused form, if it has one.
        optimizer_class: its class, if it has no fused form.
        table: the table, if it is sharded.
    """

    name: str
    parameter: nn.Parameter
    group: dict[str, Any]
    state: dict[str, Any]
    fused: FusedOptimizer | None
    optimizer_class: type = object
    table: NamedTable | None = None

    @property
    def rule(self) -> Rule | None:
        """Its rule; None if no rule stands for its class."""
        return rule_of_class(self.optimizer_class) if self.fused is None else self.fused.rule

    @property
    def kind(self) -> str:
        """Its name in a checkpoint: the name of its rule, or of its class."""
        return self.optimizer_class.__name__ if self.rule is None else self.rule.name

    def tensors(self) -> dict[str, Tensor]:
        """The state's tensors, not copied."""
        return {key: value.detach() for key, value in self.state.items() if isinstance(value, Tensor)}

    def without_a_step(self) -> SavedOptimizer:
        """What would be saved of it, with these settings, before its first step."""
        settings = {key: value for key, value in self.group.items() if key != "params"}
        return SavedOptimizer(self.name, self.kind, settings, {}, (), {})

    def described(self) -> dict[str, Any]:
        """What is saved besides tensors.

        ``blocks``: row-wise Adagrad has one state per block of columns; these are saved one after the other.
        """
        entry: dict[str, Any] = {
            "kind": self.kind,
            "settings": {key: value for key, value in self.group.items() if key != "params"},
            "values": {key: value for key, value in self.state.items() if not isinstance(value, Tensor)},
            "tensors": list(self.tensors()),
        }
        if self.table is not None and self.rule is not None:
            entry["tensors"] = list(self.rule.tensor_names)
            if self.rule.has_row_state and len(self.table.table.column_blocks) > 1:
                entry["blocks"] = list(self.table.table.column_blocks)
        return entry


def optimizers_in_backward(model: nn.Module) -> list[BackwardOptimizer]:
    """Every optimizer in backward of ``model``: of unsharded collections, then of other parameters, then of shards."""
    optimizers: list[BackwardOptimizer] = []
    fused_parameters = set(sharded_parameters(model))
    for path, collection in unsharded_collections(model).items():
        for table, fused in collection.fused_optimizers().items():
            weight = collection.weight(table)
            fused_parameters.add(id(weight))
            name = kind_of(collection).weight_name(path, table)
            optimizers.append(BackwardOptimizer(name, weight, fused.group, fused.state, fused))
    for name, parameter in model.named_parameters():
        if id(parameter) in fused_parameters:
            continue
        for number, optimizer in enumerate(attached_optimizers(parameter)):
            group, state, form = {}, {}, None
            if hasattr(optimizer, "param_groups"):
                group, state = optimizer.param_groups[0], optimizer.state[parameter]
            elif parameter.dim() == 2:  # one of TorchRec's placeholders, which a conversion would fuse
                form = fused_optimizer_of(parameter, name)
            full_name = f"{name}#{number}" if number else name
            if isinstance(form, FusedOptimizer):
                optimizers.append(BackwardOptimizer(full_name, parameter, form.group, form.state, form))
            else:
                optimizers.append(BackwardOptimizer(full_name, parameter, group, state, None, type(optimizer)))
    for named in sharded_tables(model):
        if named.first and named.name in named.module.fused:
            optimizers.append(_of_table(named))
    return optimizers


def _of_table(table: NamedTable) -> BackwardOptimizer:
    fused, spec = table.module.fused[table.name], table.table.table
    weight = nn.Parameter(torch.empty(spec.num_embeddings, spec.embedding_dim, device="meta"))
    return BackwardOptimizer(table.weight, weight, fused.group, {}, fused, table=table)


def plan_in_backward(
    model: nn.Module, saved: SavedOptimizers, moves: Mapping[str, RowMove], elsewhere: Collection[str]
) -> list[BackwardPlan]:
    """Check the saved optimizers against those of this model. Changes nothing.

    Args:
        model: the model without wrappers.
        saved: the optimizers that were saved.
        moves: the moves of tables that have more rows than saved, by weight name.
        elsewhere: the parameters whose state an ordinary optimizer takes, here or on another rank.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    optimizers = {optimizer.name: optimizer for optimizer in optimizers_in_backward(model)}
    left = [name for name in saved.in_backward if name not in elsewhere]
    check_names("an optimizer in backward for ", [], [name for name in left if name not in optimizers], STEP_AS_SAVED)
    plans: list[BackwardPlan] = []
    for name, optimizer in optimizers.items():
        kind = BackwardPlan if optimizer.table is None else ShardedBackwardPlan
        plans.append(kind(optimizer, saved.get(name) or optimizer.without_a_step(), moves.get(name)))
        plans[-1].check()
    return plans


@dataclass
class BackwardPlan:
    """What is to be done to one optimizer.

    Args:
        optimizer: the optimizer whose state is replaced; its tensors stay the same objects, so sharers see the change.
        saved: what was saved of its parameter's optimizer.
        move: where the rows go, if the table has more rows than saved.
    """

    optimizer: BackwardOptimizer
    saved: SavedOptimizer
    move: RowMove | None

    def check(self) -> None:
        """Whether the optimizer can take what was saved.

        Raises:
            CheckpointError: ``checkpoint_mismatch``.
        """
        optimizer, saved = self.optimizer, self.saved
        saved.check_kind(optimizer.kind)
        check_settings_fit(saved.settings, optimizer.group, optimizer.name)
        if optimizer.fused is not None:
            self._check_fused(optimizer.fused)
            return
        if self.move is not None and saved.tensors:
            raise saved.mismatch("its table has more rows than saved, and its optimizer is not fused.")
        settings = {**optimizer.group, **saved.settings}
        check_state_fits(
            saved.tensors, saved.values, optimizer.parameter, optimizer.optimizer_class, settings, optimizer.name
        )

    def _check_fused(self, fused: FusedOptimizer) -> None:
        """Check the state that kernels read: tensors of numbers, and a count of steps; and the settings."""
        saved, rows = self.saved, self.optimizer.parameter.shape[0] if self.move is None else self.move.saved_rows
        saved.check_state_of(fused.rule, rows, self.optimizer.parameter.shape[1])
        if bool(saved.settings.get("weight_decay")) != bool(fused.group.get("weight_decay")):
            raise saved.mismatch("only one of the saved optimizer and this one has a weight_decay.")
        if unsupported := FusedOptimizer(fused.rule, {**fused.group, **saved.settings}).changed_setting():
            raise saved.mismatch(f"it was saved with {unsupported}, which has no fused form.")
        kept = {key for key, value in {**saved.values, **saved.tensors}.items() if value is not None}
        if unknown := sorted(kept.difference(fused.rule.tensor_names)):
            raise saved.mismatch(f"its saved state {unknown[0]!a} has no place in a fused optimizer.")

    def prepare(self) -> None:
        """Allocate the state of the fused optimizer, before anything is changed."""
        if self.optimizer.fused is not None:
            self.optimizer.fused.prepare(self.optimizer.parameter)

    def carry_out(self, folder: SavedFolder) -> None:
        # The fused form has its own state if kernels could not read the optimizer's.
        fused = self.optimizer.fused
        state = self.optimizer.state if fused is None else fused.state
        for key in [key for key in state if key not in self.saved.tensors]:  # it had not taken a step yet
            if fused is not None and isinstance(state[key], Tensor):
                state[key].fill_(fused.start(key))
            else:
                del state[key]
        for key in self.saved.tensors:
            self._load(state, key, folder)
        state.update(self.saved.values)
        self.load_settings()

    def load_settings(self) -> None:
        group = self.optimizer.group
        for key, value in self.saved.settings.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value

    def _load(self, state: dict[str, Any], key: str, folder: SavedFolder) -> None:
        current, fused, saved = state.get(key), self.optimizer.fused, self.saved
        shape = saved.shape(key)
        if not isinstance(current, Tensor) or (fused is None and current.shape != shape):
            value = saved.read(folder, key)
            state[key] = value if value.dim() == 0 else value.to(self.optimizer.parameter.device)
        elif current.shape == saved.tensors[key].shape:
            folder.read_into({saved.saved_as(key): current.detach()})
        else:
            value = saved.read(folder, key)
            if current.numel() == value.numel():
                current.copy_(value.view(current.shape))
            else:
                assert self.move is not None
                assert fused is not None
                self.move.apply(value, current.fill_(fused.start(key)))


class ShardedBackwardPlan(BackwardPlan):
    """What is to be done to the fused optimizer of one sharded table, on this rank."""

    def _shards(self) -> list[tuple[Shard, Tensor, FusedOptimizer]]:
        """The shards of this rank, with their weights and optimizers."""
        table = self.optimizer.table
        assert table is not None
        store = table.module.store
        return [(shard, store.weight(shard.name), store.optimizers[shard.name]) for shard in table.local()]

    def prepare(self) -> None:
        """Allocate the state of the shards' optimizers, before anything is changed."""
        for _, weight, fused in self._shards():
            fused.prepare(weight)

    def carry_out(self, folder: SavedFolder) -> None:
        saved = self.saved
        for shard, _, fused in self._shards():
            for name in (state.name for state in fused.rule.states):
                target = fused.state[name].detach()
                if self.move is not None or name not in saved.tensors:
                    target.fill_(fused.start(name))
                if name in saved.tensors:
                    saved.read_shard(folder, name, shard, self.move, target)
            if fused.rule.counts_steps:
                steps = saved.read(folder, STEP) if STEP in saved.tensors else saved.values.get(STEP) or 0.0
                fused.state[STEP].fill_(float(steps))
        self.load_settings()
