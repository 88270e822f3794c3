"""``grid_shard``: the columns of a table are cut over hosts, and the rows of each block over the ranks of its host."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.collections.sharding.types.table_row_wise import TableRowWise


@dataclass(frozen=True)
class GridShard(TableRowWise):
    """Each block of columns is sharded as ``table_row_wise`` shards the whole table."""

    name = "grid_shard"
