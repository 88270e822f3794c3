"""``state_dict`` of a sharded collection: the keys of the unsharded one, on every rank, without any communication.

Column shards share their index, which is therefore on several ranks. A rank that has a copy says that the piece is its
own, so the metadata of such tensors differs between ranks: ``torch.distributed.checkpoint`` saves one of the copies and
loads all of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.load_state import whole_index
from recfx.collections.pieces import Piece, index_pieces, make_sharded_tensor, own_pieces, weight_pieces
from recfx.hashing import state
from recfx.hashing.identity import IDENTITY, identity
from recfx.hashing.slices import COUNTS, SLICE_COUNTS, SliceCounts
from recfx.ir.shards import ShardedTable


def save_sharded_state(
    module: ConvertedCollection, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """A state dict hook that replaces this rank's shards with whole tables: ``ShardedTensor``s whose local shards are
    views, so that ``torch.distributed.checkpoint`` loads in place; replicated tensors are plain. No rank knows what the
    others have counted: if rows are cut, statistics are in ``slice_counts``, as they were when ``state_dict`` was
    called, and those in ``counts`` are 0.
    """
    if not module.is_sharded:  # it has been sharded, and shares its hooks with what took its place
        return
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
            local = module.sharding.local_of(table.table.name)
            saved[name] = store.index(local[0].name).identity if local else identity(config, table.table.name)
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
    rank, counted = module.sharding.rank, dict[str, SliceCounts]()
    for shard in table.slices(table.filled, rank):
        index = module.store.index(shard.name) if shard.rank == rank else None
        if index is not None and not index.policy.is_whole_table:
            counted[shard.name] = index.counts_to_save(next(iter(counted.values()), None))
    return counted


def drop_shard_names(module: ConvertedCollection, incompatible_keys: Any) -> None:
    """A hook after loading that reports missing keys by table."""
    if not module.is_sharded:
        return
    others = [shard.name for shard in module.sharding.local() if shard.name != shard.table.name]
    tables = kind_of(module).tables
    names = tuple(f"{part}.{name}." for name in others for part in (tables, "hash_indexes"))
    missing: list[str] = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if not any(name in key for name in names)]
