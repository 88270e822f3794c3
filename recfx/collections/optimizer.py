"""TorchRec's view of the fused optimizers of a collection: the same names on every rank, whatever is sharded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.pieces import (
    Piece,
    common_pieces,
    make_sharded_tensor,
    own_pieces,
    parts_of,
    stacked_pieces,
    weight_pieces,
    whole_size,
)
from recfx.errors import CheckpointError, type_of
from recfx.ir.shards import ShardedTable
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules.rule import STEP


class SavedState:
    """What TorchRec's ``KeyedOptimizer`` holds for a state (``momentum1`` and so on), to save and to load it."""

    def __init__(self, module: ConvertedCollection, table: ShardedTable, state: str, fused: FusedOptimizer) -> None:
        self._module, self._table, self._state, self._fused = module, table, state, fused
        weight = kind_of(module).weight_name("", table.table.name)
        self._name, self._rank = f"{table.table.name}.{state}" if module.is_sharded else weight, module.sharding.rank
        self._is_whole = table.is_replicated or not module.is_sharded
        if state == STEP:
            self._pieces = common_pieces(table, self._rank, 1)
        else:
            per_row = state in self._fused.rule.one_dimensional
            self._pieces = stacked_pieces(table) if per_row else weight_pieces(table)

    def _tensor_of(self, piece: Piece) -> Tensor:
        """The tensor that the kernels use for one of this rank's pieces."""
        return self._module.store.optimizers[piece.shard.name].named_state()[self._state]

    def state_dict(self) -> Tensor:
        """A ``ShardedTensor`` of views; a plain tensor if this rank has all of the table."""
        if self._is_whole:
            (own,) = own_pieces(self._pieces, self._rank)
            return self._tensor_of(own).detach()
        return make_sharded_tensor(self._pieces, self._tensor_of, torch.float32, self._module.groups.pooled)

    def load_state_dict(self, saved: object) -> None:
        """Copy this rank's part of ``saved`` in place; raises as ``parts`` does."""
        for piece, part in self.parts(saved).items():
            self._tensor_of(piece).detach().copy_(part)

    def parts(self, saved: object) -> dict[Piece, Tensor]:
        """This rank's parts of ``saved``: a whole tensor, or a ``ShardedTensor`` that was cut in the same way."""
        if isinstance(saved, ShardedTensor) and not self._is_whole:
            return parts_of(saved, self._pieces, self._module.groups.pooled, self._name)
        if not isinstance(saved, Tensor) or isinstance(saved, ShardedTensor) or saved.is_meta:
            raise self._error(
                "other_plan",
                f"the saved state is {type_of(saved)}.",
                "save and load with torch.distributed.checkpoint, or load plain, whole tensors.",
            )
        whole = self._grown(saved)
        return {piece: piece.of(whole) for piece in own_pieces(self._pieces, self._rank)}

    def _grown(self, saved: Tensor) -> Tensor:
        """The whole state, with as many rows as the table has."""
        shape = whole_size(self._pieces)
        if tuple(saved.shape) == shape:
            return saved
        move = self._module._row_moves.get(self._table.table.name)  # if the weight was loaded from fewer rows
        if move is None or (move.saved_rows, *shape[1:]) != tuple(saved.shape):
            raise self._error(
                "rows_mismatch",
                f"the saved optimizer state is {tuple(saved.shape)}, but the table needs {shape}.",
                "load the model's state of the same moment first, and the optimizer's before any training step; the "
                "number of column blocks must be the same.",
            )
        start = self._fused.starts()[self._state]
        return move.apply(saved, torch.full(shape, start, dtype=saved.dtype, device=saved.device))

    def _error(self, reason: str, message: str, what_to_do: str) -> CheckpointError:
        return CheckpointError(message, reason=reason, module_path=self._name, what_to_do=what_to_do)


class FusedKeyedOptimizer(KeyedOptimizer):
    """State and settings of the fused optimizers of one collection, on every rank under the names of all tables:
    ``<table>.momentum1`` and so on are views of what the kernels use, and ``param_groups`` the dicts that they read.
    """

    def __init__(self, module: ConvertedCollection) -> None:
        self._module, self._kind, self._fused = module, kind_of(module), dict(module.fused_optimizers())
        for shard in module.sharding.local():
            if shard.name in module.store.optimizers:
                module.store.optimizers[shard.name].prepare(module.weight(shard.name))
        self._saved = {
            table: {
                f"{table}.{state}": SavedState(module, module.sharding.named(table), state, fused)
                for state in fused.rule.saved_states
            }
            for table, fused in self._fused.items()
        }
        params = {self._kind.weight_name("", table): self._parameter(table) for table in self._fused}
        self._all_states: dict[Any, Any] = {}
        super().__init__(params, {}, [fused.group for fused in self._fused.values()])

    @property
    def state(self) -> dict[Any, Any]:
        """By parameter and name; always the same dict, in which TorchRec's ``WarmupOptimizer`` keeps its own state."""
        for table, states in self._saved.items():
            self._all_states[self.params[self._kind.weight_name("", table)]] = states
        return self._all_states

    @state.setter
    def state(self, value: Any) -> None:
        """``KeyedOptimizer`` sets this once; here it is derived."""

    def step(self, closure: Any = None) -> None:
        """Do nothing: the backward of the lookups has already taken the step."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing: there are no gradients."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load as TorchRec does; whole tensors are cut. All is checked before anything changes."""
        state = self.state
        for name, parameter in self.params.items():
            saved = state_dict["state"].get(name, {})
            for key, current in state.get(parameter, {}).items():
                if key in saved and isinstance(current, SavedState):
                    current.parts(saved[key])
        super().load_state_dict(state_dict)

    def post_load_state_dict(self) -> None:
        """Let several shards of a table on one rank count the same steps."""
        for table, fused in self._fused.items():
            if fused.rule.saves_step:
                local = self._module.sharding.local_of(table)
                optimizers = [self._module.store.optimizers[shard.name] for shard in local]
                for optimizer in optimizers:
                    optimizer.state[STEP].copy_(optimizers[0].state[STEP])

    def _parameter(self, table: str) -> Tensor:
        """What represents the table in TorchRec's dicts: its first shard here, or a tensor without rows."""
        group = self._fused[table].group
        local = [shard.name for shard in self._module.sharding.local_of(table)]
        known: list[Tensor] = group.get("params", [])
        parameter = self._module.weight(local[0]) if local else known[0] if known else torch.empty(0)
        group["params"] = [parameter]
        return parameter
