"""One state tensor of a sharded table's fused optimizer, as ``KeyedOptimizer`` saves and loads it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recfx.collections.sharding.pieces import Piece, Pieces, make_sharded_tensor, own_pieces, parts_of, whole_size
from recfx.errors import CheckpointError, type_of
from recfx.hashing.row_move import RowMove
from recfx.ir.shards import ShardedTable
from recfx.optim.fused_optimizer import FusedOptimizer


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
