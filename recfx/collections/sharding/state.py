"""``state_dict`` and ``load_state_dict`` of a sharded collection: the keys of the unsharded one, on every rank, without
any communication. All of a state is checked and cut before any of it is loaded.

Column shards share their index, which is therefore on several ranks. A rank that has a copy says that the piece is its
own, so the metadata of such tensors differs between ranks: ``torch.distributed.checkpoint`` saves one of the copies and
loads all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.load_state import LocalState, fit_slices, whole_index
from recfx.collections.pieces import (
    Piece,
    Pieces,
    common_pieces,
    make_sharded_tensor,
    other_plan,
    own_pieces,
    parts_of,
    weight_pieces,
)
from recfx.hashing import state
from recfx.hashing.identity import IDENTITY, check_identity, identity
from recfx.hashing.slices import COUNTS, SLICE_COUNTS, STATISTICS, SliceCounts, parts_between, slice_state
from recfx.ir.shards import ShardedTable
from recfx.ir.tables import Shard


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
    for name in state.state_names(config):
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


def drop_shard_names(module: ConvertedCollection, incompatible_keys: Any) -> None:
    """A hook after loading that reports missing keys by table."""
    others = [shard.name for shard in module.sharding.local() if shard.name != shard.table.name]
    tables = kind_of(module).tables
    names = tuple(f"{part}.{name}." for name in others for part in (tables, "hash_indexes"))
    missing: list[str] = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if not any(name in key for name in names)]


class ShardedState(LocalState):
    """What this rank takes of a state of whole tensors, or of ``ShardedTensor``s that were cut in the same way."""

    def weights(self, table: ShardedTable, weight: Any, key: str) -> dict[Shard, Tensor]:
        if not isinstance(weight, ShardedTensor):
            return super().weights(table, weight, key)
        if table.is_replicated:
            raise other_plan(_CUT_OTHERWISE, key)
        parts = parts_of(weight, weight_pieces(table), self.module.groups.pooled, key)
        return {piece.shard: part for piece, part in parts.items()}

    def indexes(self, table: ShardedTable, saved: Mapping[str, Any], weight: Any) -> dict[Shard, dict[str, Any]]:
        """The slices of an index: each rank checks its own."""
        values = [weight, *(value for name, value in saved.items() if name not in state.NOT_BY_ROW)]
        if not any(isinstance(value, ShardedTensor) for value in values):
            return super().indexes(table, saved, weight)
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
