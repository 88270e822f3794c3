"""``state_dict`` and ``load_state_dict`` of a sharded collection: the keys of the unsharded one, on every rank, without
any communication. All of a state is checked and cut before any of it is loaded.

Column shards share their index, which is therefore on several ranks. A rank that has a copy says that the piece is its
own, so the metadata of such tensors differs between ranks: ``torch.distributed.checkpoint`` saves one of the copies and
loads all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as TensorShard

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.fit_table import (
    check_shape,
    first_rows,
    fit_index,
    saved_shape,
    say_what_is_lost_together,
    without_index,
    without_weight,
)
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.types import rank_of
from recfx.errors import CheckpointError, type_of
from recfx.hashing import HashIndex, state
from recfx.hashing.identity import IDENTITY, check_identity, identity
from recfx.hashing.row_move import RowMove, check_saved_index, saved_names
from recfx.hashing.slices import COUNTS, SLICE_COUNTS, STATISTICS, SliceCounts, parts_between, slice_state
from recfx.ir.shards import ShardedTable
from recfx.ir.tables import Shard, TableSpec
from recfx.kernels.index.index_buffers import FREED, NEVER_USED


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


def save_sharded_state(
    module: ConvertedCollection, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """A state dict hook that replaces this rank's shards with whole tables.

    Weights, and tensors of an index with one entry per row, are ``ShardedTensor``s whose local shards are views, so
    that ``torch.distributed.checkpoint`` loads in place; replicated tensors are plain. In an index's ``counts`` the
    number of batches is that of the table. No rank knows the statistics of the others: if the rows are cut, those of
    all ranks are in ``slice_counts``, as they were when ``state_dict`` was called, and those in ``counts`` are 0.
    """
    shards = {shard.name for shard in module.sharding.local()}
    kind = kind_of(module)
    for start in (f"{prefix}{kind.tables}.", f"{prefix}hash_indexes."):
        of_tables = [key for key in state_dict if key.startswith(start)]
        for key in [key for key in of_tables if key[len(start) :].partition(".")[0] in shards]:
            del state_dict[key]
    for table in module.sharding.tables:
        state_dict[prefix + kind.weight_name("", table.table.name)] = _weight(module, table)
    for table in module.sharding.tables:
        if table.table.has_index:
            for name, value in _index_state(module, table).items():
                state_dict[f"{prefix}hash_indexes.{table.table.name}.{name}"] = value


def whole_index(table: TableSpec) -> HashIndex:
    """The index of the whole table, on meta: its settings without its content."""
    assert table.hashing is not None
    return HashIndex(table.num_embeddings, config=table.hashing, name=table.name, device="meta")


def index_pieces(table: ShardedTable, name: str, rank: int) -> Pieces:
    """How one of an index's saved tensors is cut, seen from ``rank``; ``identity`` is not."""
    if name == COUNTS:
        return common_pieces(table, rank, 1, len(STATISTICS))
    return part_pieces(table, rank) if name == SLICE_COUNTS else row_pieces(table, rank)


def _weight(module: ConvertedCollection, table: ShardedTable) -> Tensor:
    store, group = module.store, module.groups.pooled
    if table.is_replicated:
        return store.weight(table.table.name).detach()
    local = [store.weight(piece.shard.name).dtype for piece in own_pieces(weight_pieces(table), group.rank())]
    dtype = local[0] if local else module.dtypes[table.table.name]
    return make_sharded_tensor(weight_pieces(table), lambda piece: store.weight(piece.shard.name), dtype, group)


def _index_state(module: ConvertedCollection, table: ShardedTable) -> dict[str, Tensor]:
    store, group, config = module.store, module.groups.pooled, table.table.hashing
    assert config is not None
    whole = whole_index(table.table)
    counted = {} if table.is_replicated else _counted(module, table)
    saved: dict[str, Tensor] = {}
    for name in saved_names(whole):
        if table.is_replicated:
            saved[name] = getattr(store.index(table.table.name), name)
        elif name == IDENTITY:
            local = own_pieces(row_pieces(table, group.rank()), group.rank())
            saved[name] = store.index(local[0].shard.name).identity if local else identity(config, table.table.name)
        else:

            def tensor_of(piece: Piece, name: str = name) -> Tensor:
                tensor: Tensor = getattr(store.index(piece.shard.name), name)
                of_slice = counted.get(piece.shard.name)
                if of_slice is not None and name == SLICE_COUNTS:
                    return of_slice.of_parts
                if of_slice is not None and name == COUNTS and piece.offsets != (0,):
                    return of_slice.of_table
                return piece.of(tensor) if name == COUNTS else tensor

            pieces = index_pieces(table, name, group.rank())
            saved[name] = make_sharded_tensor(pieces, tensor_of, getattr(whole, name).dtype, group)
    return saved


def _counted(module: ConvertedCollection, table: ShardedTable) -> dict[str, SliceCounts]:
    """What this rank's slices of a table have counted, by shard; a slice that is the whole table says it itself."""
    rank, counted = module.groups.pooled.rank(), dict[str, SliceCounts]()
    for piece in own_pieces(row_pieces(table, rank), rank):
        index = module.store.index(piece.shard.name)
        if not index.policy.is_whole_table:
            counted[piece.shard.name] = index.counts_to_save(next(iter(counted.values()), None))
    return counted


# Loading

_CUT_OTHERWISE = "the state is cut in a different way than this table."


def fit_whole_index(
    module: ConvertedCollection, table: TableSpec, shards: Sequence[Shard], saved: Mapping[str, Any], weight: object
) -> tuple[dict[Shard, dict[str, Tensor]], RowMove | None]:
    """Fit and check the saved index of a whole table, in the same way on all ranks, and cut it.

    Args:
        shards: this rank's shards of the table.
        saved: the saved state of its index, by buffer name.
        weight: the saved weight of the table, or a meta tensor like it.

    Returns:
        what this rank's shards take from it, and the move of the table's rows; None if no row moves.
    """
    fitted, move = fit_index(whole_index(table), saved, weight, table.embedding_dim)
    tensors = {name: value for name, value in fitted.items() if isinstance(value, Tensor)}
    config = table.hashing
    assert config is not None
    pieces = {shard: slice_state(config, tensors, *shard.rows) for shard in shards}
    if move is not None:
        for shard, piece in pieces.items():
            row_state = module.index(shard.name).row_state
            # Rows without an id keep their weights, and so the index keeps what it knows about them.
            piece["row_state"][(piece["row_state"] == NEVER_USED) & (row_state != NEVER_USED)] = FREED
    return pieces, move


def fit_slices(
    module: ConvertedCollection, shards: Sequence[Shard], slices: Mapping[tuple[int, int], dict[str, Any]]
) -> dict[Shard, dict[str, Any]]:
    """The slice of an index that each of this rank's shards loads: column blocks of the same rows load the same.

    Args:
        slices: the saved state of each slice, by its rows and by buffer name.
    """
    pieces = {shard: slices[shard.rows] for shard in shards}
    for shard, piece in pieces.items():
        check_saved_index(module.index(shard.name), piece)
    return pieces


def load_local_state(
    module: ConvertedCollection,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    *rest: Any,
) -> None:
    """A load hook that replaces whole tables with this rank's shards."""
    planned = LocalState(module, state_dict, prefix)
    names = [shard.name for shard in module.sharding.local() if shard.table.has_index]
    indexes = {f"{prefix}hash_indexes.{name}.": module.index(name) for name in names}
    say_what_is_lost_together(planned.local, indexes)
    for index in indexes.values():
        index.expect_load()
    for key in planned.taken:
        del state_dict[key]
    state_dict.update(planned.local)
    if local_metadata.get("assign_to_params_buffers"):
        tensors = {key: value for key, value in planned.local.items() if isinstance(value, Tensor)}
        state_dict.update({key: value.clone(memory_format=torch.contiguous_format) for key, value in tensors.items()})
    here = {shard.table.name for shard in module.sharding.local()}
    missing_keys.extend(key for key, table in planned.missing.items() if table not in here)
    module.note_row_moves(planned.moves)


def drop_shard_names(module: ConvertedCollection, incompatible_keys: Any) -> None:
    """A hook after loading that reports missing keys by table."""
    others = [shard.name for shard in module.sharding.local() if shard.name != shard.table.name]
    tables = kind_of(module).tables
    names = tuple(f"{part}.{name}." for name in others for part in (tables, "hash_indexes"))
    missing: list[str] = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if not any(name in key for name in names)]


class LocalState:
    """What this rank takes of a state of whole tensors, or of ``ShardedTensor``s that were cut in the same way.

    Attributes:
        taken: the keys of ``saved`` that belong to this collection's tables.
        local: what goes to this rank's shards, by their keys.
        missing: keys that ``saved`` lacks, and the tables they belong to.
        moves: where the rows go of tables that have more rows now, by table.
    """

    def __init__(self, module: ConvertedCollection, saved: Mapping[str, Any], prefix: str) -> None:
        self.module, self.saved, self.prefix = module, saved, prefix
        self.taken: list[str] = []
        self.local: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.moves: dict[str, RowMove] = {}
        for table in module.sharding.tables:
            self._take_table(table)

    def _take_table(self, table: ShardedTable) -> None:
        name = table.table.name
        key = self.prefix + kind_of(self.module).weight_name("", name)
        weight = self.saved.get(key)
        if table.table.has_index:
            self._take_index(table, weight)
        if weight is None:
            self.missing[key] = name
            return
        self.taken.append(key)
        for shard, part in self._weights(table, weight, key).items():
            self.local[self.prefix + kind_of(self.module).weight_name("", shard.name)] = part

    # Weights

    def _weights(self, table: ShardedTable, weight: Any, key: str) -> dict[Shard, Tensor]:
        group, move, spec = self.module.groups.pooled, self.moves.get(table.table.name), table.table
        if isinstance(weight, ShardedTensor):
            if table.is_replicated:
                raise other_plan(_CUT_OTHERWISE, key)
            return {piece.shard: part for piece, part in parts_of(weight, weight_pieces(table), group, key).items()}
        if not isinstance(weight, Tensor) or weight.is_meta:
            raise _not_a_tensor(key, weight)
        check_shape(key, weight, saved_shape(spec.num_embeddings, spec.embedding_dim, move))
        return {shard: self._part(shard, weight.detach(), move) for shard in self.module.sharding.local_of(spec.name)}

    def _part(self, shard: Shard, weight: Tensor, move: RowMove | None) -> Tensor:
        if move is None:
            return shard.of(weight)
        (first, end), (left, right) = shard.rows, shard.columns
        current = self.module.weight(shard.name).detach().to(weight.device, weight.dtype, copy=True)
        return move.within(first, end).apply(weight[:, left:right], current)

    # Indexes

    def _take_index(self, table: ShardedTable, weight: Any) -> None:
        spec, whole = table.table, whole_index(table.table)
        keys = {name: f"{self.prefix}hash_indexes.{spec.name}.{name}" for name in state.EVERY_NAME}
        self.taken.extend(key for key in keys.values() if key in self.saved)
        saved = {name: self.saved[keys[name]] for name in saved_names(whole) if keys[name] in self.saved}
        if not state.has_index(saved):
            self._take_absent(table, weight, keys)
            return
        if weight is None:
            raise without_weight(spec.name)
        values = [weight, *(value for name, value in saved.items() if name not in state.NOT_BY_ROW)]
        if any(isinstance(value, ShardedTensor) for value in values):
            pieces = self._sharded_index(table, saved, values)
        else:
            pieces, move = fit_whole_index(self.module, spec, self.module.sharding.local_of(spec.name), saved, weight)
            self.moves.update({} if move is None else {spec.name: move})
        for shard, piece in pieces.items():
            for name, value in piece.items():
                self.local[f"{self.prefix}hash_indexes.{shard.name}.{name}"] = value

    def _take_absent(self, table: ShardedTable, weight: Any, keys: Mapping[str, str]) -> None:
        """Empty the index if the state is that of a plain table."""
        spec = table.table
        for shard in self.module.sharding.local_of(spec.name):
            what = without_index(has_weight=weight is not None, holds_ids=self.module.index(shard.name).holds_ids)
            self.local[f"{self.prefix}hash_indexes.{shard.name}.{state.ABSENT}"] = what
        if weight is None:
            self.missing.update({keys[name]: spec.name for name in saved_names(whole_index(spec))})
        elif not isinstance(weight, ShardedTensor):
            move = first_rows(weight, spec.num_embeddings, spec.embedding_dim)
            if move is not None:
                self.moves[spec.name] = move

    def _sharded_index(
        self, table: ShardedTable, saved: Mapping[str, Any], values: list[Any]
    ) -> dict[Shard, dict[str, Any]]:
        """Check slices of an index: each rank checks its own."""
        spec, group = table.table, self.module.groups.pooled
        assert spec.hashing is not None
        path = f"{self.prefix}hash_indexes.{spec.name}"
        if table.is_replicated or not all(isinstance(value, ShardedTensor) for value in values):
            raise other_plan(_CUT_OTHERWISE, path)
        check_identity(spec.hashing, spec.name, saved.get(IDENTITY))
        local = self.module.sharding.local_of(spec.name)
        slices: dict[tuple[int, int], dict[str, Any]] = {shard.rows: {} for shard in local}
        for name, value in saved.items():
            if not isinstance(value, ShardedTensor):  # the same on all ranks
                for rows, piece in slices.items():
                    piece.update(slice_state(spec.hashing, {name: value}, *rows))
                continue
            pieces = index_pieces(table, name, group.rank())
            parts = parts_of(value, pieces, group, f"{path}.{name}")
            if name == COUNTS and parts:
                counts = torch.cat([parts[piece] for piece in pieces])
                for rows, piece in slices.items():
                    piece.update(slice_state(spec.hashing, {name: counts}, *rows))
            elif name != COUNTS:
                for part, tensor in parts.items():
                    slices[part.shard.rows][name] = tensor
        return fit_slices(self.module, local, slices)


def _not_a_tensor(path: str, value: object) -> CheckpointError:
    what = "a tensor on meta" if isinstance(value, Tensor) else type_of(value)
    return CheckpointError(
        f"the saved weight is {what}.",
        reason="not_a_tensor",
        module_path=path,
        what_to_do="load a state of tensors or ShardedTensors.",
    )
