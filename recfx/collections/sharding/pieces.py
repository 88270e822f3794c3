"""Where the tensors of a sharded table are cut, as checkpoints see it: pieces, and ``ShardedTensor``s made of them.

Column shards share their index, which is therefore on several ranks. A rank that has a copy says that the piece is its
own, so the metadata of such tensors differs between ranks: ``torch.distributed.checkpoint`` saves one of the copies and
loads all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as TensorShard

from recfx.collections.sharding.placement import rank_of
from recfx.errors import CheckpointError
from recfx.hashing.slices import STATISTICS, parts_between
from recfx.ir.shard import Shard
from recfx.ir.shards import ShardedTable


@dataclass(frozen=True)
class Piece:
    """A part of a tensor on one rank.

    Args:
        offsets: where it begins, one number per dimension.
        sizes: its size, one number per dimension.
        rank: the rank that has it.
        shard: the table's shard that it belongs to.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int
    shard: Shard

    def of(self, whole: Tensor) -> Tensor:
        """This part of the whole tensor: a view."""
        return whole[tuple(slice(begin, begin + n) for begin, n in zip(self.offsets, self.sizes, strict=True))]


Pieces = tuple[Piece, ...]


def weight_pieces(table: ShardedTable) -> Pieces:
    """The pieces of a tensor that has the weight's shape ``[rows, dim]``."""
    return tuple(
        Piece((shard.rows[0], shard.columns[0]), (shard.num_rows, shard.num_columns), shard.rank, shard)
        for shard in table.filled
    )


def stacked_pieces(table: ShardedTable) -> Pieces:
    """The pieces of one number per row and column block, ``[blocks * rows]``: block after block, as in TorchRec."""
    return tuple(Piece((table.stacked_row(shard),), (shard.num_rows,), shard.rank, shard) for shard in table.filled)


def row_pieces(table: ShardedTable, rank: int) -> Pieces:
    """The pieces of one value per row that all column shards have: this rank's copies, or those of the first block."""
    return tuple(
        Piece((shard.rows[0],), (shard.num_rows,), shard.rank, shard) for shard in table.slices(table.filled, rank)
    )


def part_pieces(table: ShardedTable, rank: int) -> Pieces:
    """The pieces of an index's ``slice_counts``: those of the parts that begin in the rows of each slice."""
    config = table.table.hashing
    assert config is not None
    pieces = []
    for shard in table.slices(table.filled, rank):
        parts = parts_between(config, *shard.rows)
        pieces.append(Piece((parts.start, 0), (len(parts), len(STATISTICS)), shard.rank, shard))
    return tuple(pieces)


def common_pieces(table: ShardedTable, rank: int, *sizes: int) -> Pieces:
    """The pieces, of these sizes, of numbers that all shards have: those of this rank's first slice."""
    slices = table.slices(table.filled, rank)
    shard = next((shard for shard in slices if shard.rank == rank), slices[0])
    begins = itertools.accumulate(sizes, initial=0)
    return tuple(Piece((begin,), (size,), shard.rank, shard) for begin, size in zip(begins, sizes, strict=False))


def own_pieces(pieces: Pieces, rank: int) -> list[Piece]:
    """The pieces of this rank."""
    return [piece for piece in pieces if piece.rank == rank]


def whole_size(pieces: Pieces) -> tuple[int, ...]:
    """Size of the whole tensor."""
    dimensions = range(len(pieces[0].sizes))
    return tuple(max(piece.offsets[each] + piece.sizes[each] for piece in pieces) for each in dimensions)


def make_sharded_tensor(
    pieces: Pieces, tensor_of: Callable[[Piece], Tensor], dtype: torch.dtype, group: dist.ProcessGroup
) -> ShardedTensor:
    """A ``ShardedTensor`` around this rank's tensors; no communication.

    Args:
        pieces: the pieces of all ranks.
        tensor_of: the tensor of one of this rank's pieces; a view of it becomes the local shard.
        dtype: dtype of the whole tensor.
        group: the process group whose ranks the pieces name.
    """
    local = {piece: tensor_of(piece).detach() for piece in own_pieces(pieces, group.rank())}
    device = next((tensor.device for tensor in local.values()), torch.device("cpu"))
    metadata = {
        piece: ShardMetadata(
            list(piece.offsets), list(piece.sizes), f"rank:{dist.get_global_rank(group, piece.rank)}/{device}"
        )
        for piece in pieces
    }
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [TensorShard(tensor, metadata[piece]) for piece, tensor in local.items()],
        ShardedTensorMetadata(list(metadata.values()), torch.Size(whole_size(pieces)), TensorProperties(dtype=dtype)),
        process_group=group,
    )


def parts_of(saved: ShardedTensor, pieces: Pieces, group: dist.ProcessGroup, name: str) -> dict[Piece, Tensor]:
    """This rank's pieces out of a ``ShardedTensor`` that was cut in the same way.

    Raises:
        CheckpointError: ``other_plan``.
    """
    found = {
        (tuple(shard.shard_offsets), tuple(shard.shard_sizes), rank_of(shard))
        for shard in saved.metadata().shards_metadata
        if math.prod(shard.shard_sizes) > 0
    }
    wanted = {(piece.offsets, piece.sizes, dist.get_global_rank(group, piece.rank)) for piece in pieces}
    if found != wanted:
        raise CheckpointError(
            f"the saved tensor is cut into {_listed(found)}, but here it is cut into {_listed(wanted)} "
            "(offsets, sizes, rank).",
            reason="other_plan",
            module_path=name,
            what_to_do="save and load with torch.distributed.checkpoint, which reshards tensors; or load a state of "
            "plain, whole tensors.",
        )
    tensors = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in saved.local_shards()}
    return {piece: tensors[piece.offsets] for piece in own_pieces(pieces, group.rank())}


def _listed(cuts: Collection[tuple[tuple[int, ...], tuple[int, ...], int | None]]) -> str:
    return ", ".join(sorted(map(str, cuts))[:4]) + (", ..." if len(cuts) > 4 else "")
