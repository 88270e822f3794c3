"""What the indexes of a collection have counted, as a table: for text and HTML."""

from __future__ import annotations

from collections.abc import Callable

from recfx.inspect import wording
from recfx.inspect.table_report import TableReport

_COUNTERS = ("batches", "ids_seen", "inserted", "evicted", "shared_answers", "unseen_answers")

INDEX_COLUMNS = (
    "table", "batches", "ids seen", "inserted", "evicted", "shared", "unseen", "waiting",
    "worst bucket", "probe", "bytes/row",
)  # fmt: skip


def has_index(table: TableReport) -> bool:
    """Whether the table has an index that holds data."""
    return table.hashing is not None and table.hashing.ids_held is not None


def index_row(table: TableReport, count: Callable[[int], str]) -> tuple[str, ...]:
    """The cells of one table that has an index.

    Args:
        table: a table that has an index.
        count: formats a number.
    """
    found = table.hashing
    assert found is not None
    assert found.worst_bucket_occupancy is not None
    counters = dict(found.counters)
    return (
        table.name,
        *(count(counters[name]) for name in _COUNTERS),
        "" if found.candidates is None else count(found.candidates),
        "" if found.worst_bucket is None else f"{found.worst_bucket}: {wording.share(found.worst_bucket_occupancy)}",
        f"{found.longest_probe}",
        f"{(found.index_bytes or 0) / (found.rows_here or 1):.1f}",
    )
