"""Optimizers in backward, fused or not, in a checkpoint: by the name of their parameter.

Saved optimizers are checked against the model's first, then read into their tensors. The optimizer of a sharded table
is described as if the table were whole; each rank reads the state of its own shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recfx.checkpoint import storage
from recfx.checkpoint.contents import IN_BACKWARD, check_names, mismatch
from recfx.checkpoint.optimizer_fits import check_settings_fit, check_state_fits, is_number
from recfx.checkpoint.saved_folder import SavedFolder
from recfx.checkpoint.sharded import read_rows
from recfx.checkpoint.table_names import NamedTable, sharded_parameters, sharded_tables
from recfx.collections.collection import unsharded_collections
from recfx.collections.kinds import kind_of
from recfx.hashing.row_move import RowMove
from recfx.ir.shard import Shard
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import fused_optimizer_of
from recfx.optim.rules import rule_of_class
from recfx.optim.rules.rule import STEP, Rule, StateTensor

_ATTACH_AS_SAVED = "attach the optimizers as they were attached when saving, or load with in_backward=False."


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
    model: nn.Module, described: Mapping[str, Tensor], saved: Mapping[str, Any], moves: Mapping[str, RowMove]
) -> list[BackwardPlan]:
    """Check the saved optimizers against those of this model. Changes nothing.

    Args:
        model: the model without wrappers.
        described: shapes and dtypes of everything that is saved.
        saved: what ``BackwardOptimizer.described`` said of each optimizer.
        moves: the moves of tables that have more rows than saved, by weight name.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    optimizers = {optimizer.name: optimizer for optimizer in optimizers_in_backward(model)}
    check_names("an optimizer in backward for ", list(optimizers), list(saved), _ATTACH_AS_SAVED)
    plans: list[BackwardPlan] = []
    for name, entry in saved.items():
        absent = [key for key in entry["tensors"] if f"{IN_BACKWARD}{name}.{key}" not in described]
        if absent:
            raise _mismatch(f"the checkpoint lacks its state {absent[0]!a}.", name)
        tensors = {key: described[f"{IN_BACKWARD}{name}.{key}"] for key in entry["tensors"]}
        kind = BackwardPlan if optimizers[name].table is None else ShardedBackwardPlan
        plans.append(kind(optimizers[name], entry, tensors, moves.get(name)))
        plans[-1].check()
    return plans


def _mismatch(message: str, name: str) -> Exception:
    return mismatch(message, module_path=name, what_to_do=_ATTACH_AS_SAVED)


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
        optimizer, saved, name = self.optimizer, self.saved, self.optimizer.name
        if saved["kind"] != optimizer.kind:
            raise _mismatch(f"the saved optimizer is {saved['kind']}, this one is {optimizer.kind}.", name)
        check_settings_fit(saved["settings"], optimizer.group, name)
        if optimizer.fused is None:
            if self.move is not None and self.tensors:
                raise _mismatch("its table has more rows than saved, and its optimizer is not fused.", name)
            settings = {**optimizer.group, **saved["settings"]}
            check_state_fits(
                self.tensors, saved["values"], optimizer.parameter, optimizer.optimizer_class, settings, name
            )
        else:
            self._check_fused(optimizer.fused.rule)

    def _check_fused(self, rule: Rule) -> None:
        """Check the state that kernels read: tensors of numbers, and a count of steps."""
        saved, name, values = self.saved, self.optimizer.name, self.saved["values"]
        for key in (state.name for state in rule.states):
            if key in values or (key in self.tensors and not self.tensors[key].dtype.is_floating_point):
                raise _mismatch(f"its saved state {key!r} is not a tensor of floats.", name)
        if not is_number(self.tensors.get(STEP, values.get(STEP, 0))):
            raise _mismatch("its saved 'step' is not a number.", name)
        if bool(saved["settings"].get("weight_decay")) != bool(self.optimizer.group.get("weight_decay")):
            raise _mismatch("only one of the saved optimizer and this one has a weight_decay.", name)
        rows, dim = self.optimizer.parameter.shape
        rows = rows if self.move is None else self.move.saved_rows
        if "blocks" in saved and (not rule.has_row_state or saved["blocks"][-1][1] != dim):
            raise _mismatch(f"its state was saved in blocks of columns {saved['blocks']}.", name)
        for state in rule.states if self.tensors else ():
            blocks = len(saved.get("blocks", [()])) if state.per_row else 1
            key, shape = state.name, state.shape(rows * blocks, dim)
            if key not in self.tensors or self.tensors[key].shape != shape:
                saved_shape = tuple(self.tensors[key].shape) if key in self.tensors else "missing"
                raise _mismatch(f"its state {key!r} is {saved_shape}, but the table needs {shape}.", name)

    def prepare(self) -> None:
        """Allocate the state of the fused optimizer, before anything is changed."""
        if self.optimizer.fused is not None:
            self.optimizer.fused.prepare(self.optimizer.parameter)

    def carry_out(self, folder: SavedFolder) -> None:
        # The fused form has its own state if kernels could not read the optimizer's.
        fused = self.optimizer.fused
        state = self.optimizer.state if fused is None else fused.state
        for key in [key for key in state if key not in self.tensors]:  # the saved optimizer had not taken a step yet
            if fused is not None and isinstance(state[key], Tensor):
                state[key].fill_(fused.start(key))
            else:
                del state[key]
        for key in self.tensors:
            self._load(state, key, folder)
        state.update(self.saved["values"])
        self.load_settings()

    def load_settings(self) -> None:
        group = self.optimizer.group
        for key, value in self.saved["settings"].items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value

    def _load(self, state: dict[str, Any], key: str, folder: SavedFolder) -> None:
        current, fused, described = state.get(key), self.optimizer.fused, self.tensors[key]
        own = None if self.optimizer.rule is None else self.optimizer.rule.state_named(key)
        blocks = self.saved.get("blocks") if own is not None and own.per_row else None
        shape = described.shape if blocks is None else torch.Size((described.shape[0] // len(blocks), 1))
        if not isinstance(current, Tensor) or (fused is None and current.shape != shape):
            saved = self._read(folder, key, blocks)
            state[key] = saved if saved.dim() == 0 else saved.to(self.optimizer.parameter.device)
        elif current.shape == described.shape:
            storage.read_into(folder, {self.saved_as(key): current.detach()})
        else:
            saved = self._read(folder, key, blocks)
            if current.numel() == saved.numel():
                current.copy_(saved.view(current.shape))
            else:
                assert self.move is not None
                assert fused is not None
                self.move.apply(saved, current.fill_(fused.start(key)))

    def saved_as(self, key: str) -> str:
        """The name of a state in the checkpoint."""
        return f"{IN_BACKWARD}{self.optimizer.name}.{key}"

    def _read(self, folder: SavedFolder, key: str, blocks: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """A saved tensor; if it has one number per row and block of columns, their mean, weighted by columns."""
        (saved,) = storage.read(folder, {self.saved_as(key): self.tensors[key]}).values()
        if blocks is None:
            return saved
        mean = torch.zeros(saved.shape[0] // len(blocks), 1, dtype=saved.dtype, device="cpu")
        for part, (left, right) in zip(saved.chunk(len(blocks)), blocks, strict=True):
            mean += part * ((right - left) / blocks[-1][1])
        return mean


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
        for shard, _, fused in self._shards():
            for state in fused.rule.states:
                target = fused.state[state.name].detach()
                if self.move is not None or state.name not in self.tensors:
                    target.fill_(fused.start(state.name))
                if state.name in self.tensors:
                    self._read_state(folder, state, shard, target)
            if fused.rule.counts_steps:
                saved = self._read(folder, STEP) if STEP in self.tensors else self.saved["values"].get(STEP) or 0.0
                fused.state[STEP].fill_(float(saved))
        self.load_settings()

    def _read_state(self, folder: SavedFolder, state: StateTensor, shard: Shard, target: Tensor) -> None:
        described, dim = self.tensors[state.name], self.optimizer.parameter.shape[1]

        def read(target: Tensor, column: int, row: int = 0) -> None:
            read_rows(folder, self.saved_as(state.name), described, shard, self.move, target, column, row)

        if not state.per_row:
            return read(target, shard.columns[0])
        blocks = [tuple(block) for block in self.saved.get("blocks") or [(0, dim)]]
        rows = described.shape[0] // len(blocks)
        if shard.columns in blocks:
            return read(target, 0, blocks.index(shard.columns) * rows)
        if len(blocks) == 1:
            return read(target, 0)
        mean, part = torch.zeros_like(target), torch.empty_like(target)
        for number, (left, right) in enumerate(blocks):
            part.copy_(target)  # keeps rows for which nothing was saved
            read(part, 0, number * rows)
            mean += part * ((right - left) / dim)
        target.copy_(mean)
        return None
