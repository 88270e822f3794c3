"""How the tables of a collection are sharded, as a table: for text and HTML."""

from __future__ import annotations

from collections.abc import Iterable

from recfx.inspect import wording
from recfx.inspect.sharding_report import ShardingReport, ShardReport
from recfx.inspect.table_report import TableReport

SHARDING_COLUMNS = ("table", "sharding", "kernel", "pooled rows", "where", "rows here", "columns here", "size here")


def sharding_title(tables: Iterable[TableReport]) -> str:
    """The title, which says which rank's view this is; ``""`` if nothing is sharded."""
    found = next((table.sharding for table in tables if table.sharding is not None), None)
    return "" if found is None else f"sharding, as rank {found.rank} of {found.world_size} sees it"


def sharding_row(table: TableReport, most: int = 3) -> tuple[str, ...]:
    """The cells of one sharded table; the first ``most`` shards are written out."""
    found = table.sharding
    assert found is not None
    return (
        table.name,
        found.sharding_type,
        found.compute_kernel,
        found.travels,
        _where(table, found, most),
        f"{found.rows_here:,}",
        f"{found.columns_here}",
        wording.size(found.bytes_here),
    )


def _where(table: TableReport, found: ShardingReport, most: int) -> str:
    if found.is_replicated:
        return "every rank"
    shown = tuple(_shard(table, shard) for shard in found.shards)
    return wording.listed(shown, most)


def _shard(table: TableReport, shard: ShardReport) -> str:
    """``1: rows 10-19, columns 0-3``; a dimension that is not cut is left out."""
    (first, end), (left, right) = shard.rows, shard.columns
    if first == end:
        return f"{shard.rank}: nothing"
    parts = [] if end - first == table.rows else [f"rows {first:,}-{end - 1:,}"]
    parts += [] if right - left == table.dim else [f"columns {left}-{right - 1}"]
    return f"{shard.rank}: {' of '.join(parts[::-1]) or 'all'}"
