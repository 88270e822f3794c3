"""How whole tensors of a table are cut into pieces, one for each shard; and ``ShardedTensor``s of these pieces."""

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

from recfx.errors import CheckpointError
from recfx.hashing.slices import COUNTS, SLICE_COUNTS, STATISTICS, parts_between
from recfx.ir.shards import ShardedTable
from recfx.ir.tables import Shard


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, on one rank: where it begins and its size in each dimension, and the shard it belongs to."""

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


def common_pieces(table: ShardedTable, rank: int, *sizes: int) -> Pieces:
    """The pieces, of these sizes, of numbers that all shards have: those of this rank's first slice."""
    slices = table.slices(table.filled, rank)
    shard = next((shard for shard in slices if shard.rank == rank), slices[0])
    begins = itertools.accumulate(sizes, initial=0)
    return tuple(Piece((begin,), (size,), shard.rank, shard) for begin, size in zip(begins, sizes, strict=False))


def index_pieces(table: ShardedTable, name: str, rank: int) -> Pieces:
    """How a saved tensor of an index is cut; column blocks share one: of ``rank``, or of the first block."""
    if name == COUNTS:
        return common_pieces(table, rank, 1, len(STATISTICS))
    slices, config = table.slices(table.filled, rank), table.table.hashing
    assert config is not None
    if name != SLICE_COUNTS:
        return tuple(Piece((shard.rows[0],), (shard.num_rows,), shard.rank, shard) for shard in slices)
    parts = [(shard, parts_between(config, *shard.rows)) for shard in slices]  # that begin in the rows of each slice
    return tuple(Piece((own.start, 0), (len(own), len(STATISTICS)), shard.rank, shard) for shard, own in parts)


def own_pieces(pieces: Pieces, rank: int) -> list[Piece]:
    """The pieces of this rank."""
    return [piece for piece in pieces if piece.rank == rank]


def whole_size(pieces: Pieces) -> tuple[int, ...]:
    """Size of the whole tensor."""
    dimensions = range(len(pieces[0].sizes))
    return tuple(max(piece.offsets[dimension] + piece.sizes[dimension] for piece in pieces) for dimension in dimensions)


def make_sharded_tensor(
    pieces: Pieces, tensor_of: Callable[[Piece], Tensor], dtype: torch.dtype, group: dist.ProcessGroup
) -> ShardedTensor:
    """A ``ShardedTensor`` around views of this rank's tensors, of which ``tensor_of`` gives each; no communication."""
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
    """This rank's pieces out of a ``ShardedTensor`` that was cut in the same way (``other_plan``)."""
    saved_cuts = {
        (tuple(shard.shard_offsets), tuple(shard.shard_sizes), rank_of(shard))
        for shard in saved.metadata().shards_metadata
        if math.prod(shard.shard_sizes) > 0
    }
    cuts = {(piece.offsets, piece.sizes, dist.get_global_rank(group, piece.rank)) for piece in pieces}
    if saved_cuts != cuts:
        what = f"tensor is cut into {_listed(saved_cuts)}, but here it is cut into {_listed(cuts)}"
        raise other_plan(f"the saved {what} (offsets, sizes, rank).", name)
    tensors = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in saved.local_shards()}
    return {piece: tensors[piece.offsets] for piece in own_pieces(pieces, group.rank())}


def other_plan(message: str, path: str) -> CheckpointError:
    """The error for a state that was cut by another plan."""
    return CheckpointError(
        message,
        reason="other_plan",
        module_path=path,
        what_to_do="save and load with torch.distributed.checkpoint, which reshards tensors; or load a state of "
        "plain, whole tensors.",
    )


def _listed(cuts: Collection[tuple[tuple[int, ...], tuple[int, ...], int | None]]) -> str:
    return ", ".join(sorted(map(str, cuts))[:4]) + (", ..." if len(cuts) > 4 else "")


def rank_of(shard: ShardMetadata) -> int | None:
    """The rank of a shard's placement; None if it names no rank, such as ``cpu``."""
    rank = getattr(shard.placement, "rank", None)
    number = rank() if callable(rank) else None
    return None if number is None else int(number)
