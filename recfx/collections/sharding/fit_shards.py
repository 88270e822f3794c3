"""What a rank's shards take from a saved index: a whole index is fitted and then cut; slices are checked one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from recfx.collections.fit_table import fit_index
from recfx.collections.sharding.sharded_tables import ShardedTables
from recfx.collections.sharding.state import whole_index
from recfx.hashing.row_move import RowMove, check_saved_index
from recfx.hashing.slices import slice_state
from recfx.ir.shard import Shard
from recfx.ir.shards import ShardedTable
from recfx.kernels.index_buffers import FREED, NEVER_USED


def fit_whole_index(
    module: ShardedTables, table: ShardedTable, found: Mapping[str, Any], weight: object
) -> tuple[dict[Shard, dict[str, Tensor]], RowMove | None]:
    """Fit and check the index of a whole table, in the same way on all ranks, and cut it.

    Args:
        module: the collection whose shards are to load it.
        table: the table that the index belongs to.
        found: the saved index, by buffer name.
        weight: the saved weight of the table, or a meta tensor like it.

    Returns:
        what this rank's shards take from it, and the move of the table's rows; None if no row moves.

    Raises:
        CheckpointError: the same as ``fit_index``.
    """
    fitted, move = fit_index(whole_index(table.table), found, weight, table.table.embedding_dim)
    tensors = {name: value for name, value in fitted.items() if isinstance(value, Tensor)}
    config = table.table.hashing
    assert config is not None
    pieces = {shard: slice_state(config, tensors, *shard.rows) for shard in module.local_shards(table.table.name)}
    if move is not None:
        for shard, piece in pieces.items():
            row_state = module.index(shard.name).row_state
            # Rows without an id keep their weights, and so the index keeps what it knows about them.
            piece["row_state"][(piece["row_state"] == NEVER_USED) & (row_state != NEVER_USED)] = FREED
    return pieces, move


def fit_slices(
    module: ShardedTables, table: ShardedTable, slices: Mapping[tuple[int, int], dict[str, Any]]
) -> dict[Shard, dict[str, Any]]:
    """Check slices of an index with as many rows as the table has: each rank checks its own.

    Args:
        module: the collection whose shards are to load them.
        table: the table that the index belongs to.
        slices: the saved state of each slice, by its rows and by buffer name.

    Returns:
        what each of this rank's shards takes: column blocks of the same rows take the same.

    Raises:
        CheckpointError: the same as ``check_saved_index``.
    """
    pieces = {shard: slices[shard.rows] for shard in module.local_shards(table.table.name)}
    for shard, piece in pieces.items():
        check_saved_index(module.index(shard.name), piece)
    return pieces
