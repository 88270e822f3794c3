"""TorchRec's view of the fused optimizers of a sharded collection: the same names on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

from recfx.collections.kinds import CollectionKind
from recfx.collections.sharding.state import (
    Piece,
    Pieces,
    common_pieces,
    make_sharded_tensor,
    own_pieces,
    parts_of,
    stacked_pieces,
    weight_pieces,
    whole_size,
)
from recfx.errors import CheckpointError, type_of
from recfx.hashing.row_move import RowMove
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.keyed_optimizer import present_names, with_wrappers
from recfx.optim.rules.rule import STEP
from recfx.runtime import TableStore


class SavedState:
    """What TorchRec's ``KeyedOptimizer`` holds for a state, whose ``state_dict`` and ``load_state_dict`` it calls.

    Args:
        name: ``<table>.momentum1`` and so on.
        table: the table that the state belongs to.
        pieces: how the whole is cut.
        tensor_of: the tensor that the kernels use for one of this rank's pieces.
        group: the process group of all ranks.
        move: where the table's rows are, if its weight was loaded from fewer rows.
        fused: rule and settings of the optimizer.
    """

    def __init__(
        self,
        name: str,
        table: ShardedTable,
        pieces: Pieces,
        tensor_of: Callable[[Piece], Tensor],
        group: dist.ProcessGroup,
        move: RowMove | None,
        fused: FusedOptimizer,
    ) -> None:
        self._name, self._table, self._pieces, self._tensor_of = name, table, pieces, tensor_of
        self._group, self._move, self._fused = group, move, fused

    def state_dict(self) -> Tensor:
        """A ``ShardedTensor`` of views; a plain tensor if the table is replicated."""
        if self._table.is_replicated:
            (own,) = own_pieces(self._pieces, self._group.rank())
            return self._tensor_of(own).detach()
        return make_sharded_tensor(self._pieces, self._tensor_of, torch.float32, self._group)

    def load_state_dict(self, saved: object) -> None:
        """Copy this rank's part of ``saved`` in place.

        Raises:
            CheckpointError: as ``parts``.
        """
        for piece, part in self.parts(saved).items():
            self._tensor_of(piece).detach().copy_(part)

    def parts(self, saved: object) -> dict[Piece, Tensor]:
        """This rank's parts of ``saved``: a whole tensor, or a ``ShardedTensor`` that was cut in the same way.

        Raises:
            CheckpointError: ``other_plan``, ``shape_mismatch``; ``rows_mismatch``: no weights with this number of rows
                were loaded since the last training step.
        """
        if isinstance(saved, ShardedTensor) and not self._table.is_replicated:
            return parts_of(saved, self._pieces, self._group, self._name)
        if not isinstance(saved, Tensor) or isinstance(saved, ShardedTensor) or saved.is_meta:
            raise self._error(
                "other_plan",
                f"the saved state is {type_of(saved)}.",
                "save and load with torch.distributed.checkpoint, or load plain, whole tensors.",
            )
        whole = self._grown(saved)
        return {piece: piece.of(whole) for piece in own_pieces(self._pieces, self._group.rank())}

    def _grown(self, saved: Tensor) -> Tensor:
        """The whole state, with as many rows as the table has."""
        wanted = whole_size(self._pieces)
        if tuple(saved.shape) == wanted:
            return saved
        rows = self._table.table.num_embeddings
        if len(wanted) == 1 and saved.dim() == 1 and wanted[0] > rows:
            raise self._error(
                "shape_mismatch",
                f"the saved state has {saved.numel()} numbers, but here are {wanted[0]}: one per row and column block.",
                f"{self._fused.rule.label} cannot change the number of column blocks; load without the optimizer.",
            )
        if (
            self._move is None
            or saved.dim() != len(wanted)
            or (self._move.saved_rows, *wanted[1:]) != tuple(saved.shape)
        ):
            raise self._error(
                "rows_mismatch",
                f"the saved optimizer state is {tuple(saved.shape)}, but the table needs {wanted}.",
                "load the model's state of the same moment first, and the optimizer's before any training step.",
            )
        start = self._fused.starts()[self._name.rpartition(".")[2]]
        return self._move.apply(saved, torch.full(wanted, start, dtype=saved.dtype, device=saved.device))

    def _error(self, reason: str, message: str, what_to_do: str) -> CheckpointError:
        return CheckpointError(message, reason=reason, module_path=self._name, what_to_do=what_to_do)


class ShardedFusedOptimizer(KeyedOptimizer):
    """State and settings of the fused optimizers of one sharded collection.

    ``state_dict()`` has ``<table>.momentum1`` and so on as ``ShardedTensor``s around the tensors that the kernels use
    (plain tensors for replicated tables), under the names of all tables, on every rank. ``param_groups`` are the dicts
    that the kernels read, one per table.

    Args:
        sharding: the sharding of the collection.
        store: this rank's shards.
        fused: rule and settings of each table's optimizer.
        group: the process group of all ranks.
        moves: the row moves of tables whose weights were loaded from fewer rows, by table.
        kind: of the collection.
    """

    def __init__(
        self,
        sharding: CollectionSharding,
        store: TableStore,
        fused: Mapping[str, FusedOptimizer],
        group: dist.ProcessGroup,
        moves: Mapping[str, RowMove],
        kind: CollectionKind,
    ) -> None:
        self._kind = kind
        self._sharding, self._store, self._fused, self._group, self._moves = sharding, store, fused, group, moves
        for shard in sharding.local():
            if shard.name in store.optimizers:
                store.optimizers[shard.name].prepare(store.weight(shard.name))
        params = {kind.weight_name("", table): self._parameter(table) for table in fused}
        self._all_states: dict[Any, Any] = {}
        super().__init__(params, {}, [fused[table].group for table in fused])

    @property
    def state(self) -> dict[Any, Any]:
        """By parameter and name: objects that save and load what the kernels use at that moment.

        It is always the same dict, in which TorchRec's ``WarmupOptimizer`` keeps a state of its own.
        """
        parameters = {table: self.params[self._kind.weight_name("", table)] for table in self._fused}
        self._all_states.update({parameter: self._states(table) for table, parameter in parameters.items()})
        return self._all_states

    @state.setter
    def state(self, value: Any) -> None:
        """``KeyedOptimizer`` sets this once; here it is derived."""

    def step(self, closure: Any = None) -> None:
        """Do nothing: the backward of the lookups has already taken the step."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing: there are no gradients."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load as TorchRec does; whole tensors are cut.

        Raises:
            CheckpointError: ``other_plan``, ``rows_mismatch``, ``shape_mismatch``. Nothing has changed.
            ValueError: TorchRec's own error, for different tables or state.
        """
        state, found = self.state, dict(state_dict["state"])
        for name, parameter in self.params.items():
            if name in found:
                found[name] = present_names(found[name], state.get(parameter, {}))
            saved = found.get(name, {})
            for key, current in state.get(parameter, {}).items():
                if key in saved and isinstance(current, SavedState):
                    current.parts(saved[key])
        with with_wrappers(self, found):
            super().load_state_dict({**state_dict, "state": found})

    def post_load_state_dict(self) -> None:
        """Several shards of a table on one rank count the same steps."""
        for table, fused in self._fused.items():
            if fused.rule.saves_step:
                steps = self._steps(table)
                for step in steps:
                    step.copy_(steps[0])

    def _steps(self, table: str) -> list[Tensor]:
        return [self._store.optimizers[shard.name].state[STEP] for shard in self._sharding.local_of(table)]

    def _parameter(self, table: str) -> Tensor:
        """What represents the table in TorchRec's dicts: its first shard here, or a tensor without rows."""
        group = self._fused[table].group
        local = [shard.name for shard in self._sharding.local_of(table)]
        known: list[Tensor] = group.get("params", [])
        parameter = self._store.weight(local[0]) if local else known[0] if known else torch.empty(0)
        group["params"] = [parameter]
        return parameter

    def _states(self, table: str) -> dict[str, SavedState]:
        sharded, fused = self._sharding.named(table), self._fused[table]
        return {f"{table}.{name}": self._saved_state(sharded, fused, name) for name in fused.rule.saved_states}

    def _saved_state(self, table: ShardedTable, fused: FusedOptimizer, name: str) -> SavedState:
        rank = self._group.rank()
        if name == STEP:
            pieces = common_pieces(table, rank, 1)
        else:
            pieces = stacked_pieces(table) if name in fused.rule.one_dimensional else weight_pieces(table)
        return SavedState(
            f"{table.table.name}.{name}", table, pieces, partial(self._tensor, name), self._group,
            self._moves.get(table.table.name), fused,
        )  # fmt: skip

    def _tensor(self, name: str, piece: Piece) -> Tensor:
        return self._store.optimizers[piece.shard.name].named_state()[name]
