"""The sharding types, and the one list that names them all."""

from __future__ import annotations

from recfx.collections.sharding.types.by_columns import ColumnWise, TableColumnWise, TableWise
from recfx.collections.sharding.types.by_rows import GridShard, RowWise, TableRowWise
from recfx.collections.sharding.types.data_parallel import DataParallel
from recfx.ir.shards import ShardingType

# In the order in which the planner tries equally good types.
SHARDING_TYPES: list[ShardingType] = [
    DataParallel(),
    TableWise(),
    ColumnWise(),
    TableColumnWise(),
    RowWise(),
    TableRowWise(),
    GridShard(),
]


def type_names() -> tuple[str, ...]:
    """The names of all types, in their order."""
    return tuple(sharding_type.name for sharding_type in SHARDING_TYPES)


def type_named(name: str) -> ShardingType:
    """The type of this name.

    Raises:
        KeyError: there is none.
    """
    return {sharding_type.name: sharding_type for sharding_type in SHARDING_TYPES}[name]


__all__ = ["SHARDING_TYPES", "type_named", "type_names"]
