"""What the indexes of a model have counted, and which of them fill up, as tables: for text and HTML."""

from __future__ import annotations

from collections.abc import Callable

from recfx.inspect import wording
from recfx.inspect.collection_rows import FEW
from recfx.inspect.grid import LISTS_EACH, Grid
from recfx.inspect.names import plural
from recfx.inspect.reason_rows import FILLING
from recfx.inspect.table_groups import TableOf
from recfx.inspect.table_report import HashingReport, TableReport

_COUNTERS = ("batches", "ids_seen", "inserted", "evicted", "shared_answers", "unseen_answers")

INDEX_COLUMNS = (
    "table", "batches", "ids seen", "inserted", "evicted", "shared", "unseen", "waiting",
    "worst bucket", "probe", "bytes/row",
)  # fmt: skip
_FILLING_COLUMNS = (
    "table", "collection", "ids held", "full", "worst bucket", "fits", "full in", "suggested", "seen", "evicted",
    "shared", "unseen", "waiting", "probe", "bytes/row",
)  # fmt: skip

_FULLEST = 5


def has_index(table: TableReport) -> bool:
    """Whether the table has an index that holds data."""
    return table.hashing is not None and table.hashing.ids_held is not None


def filling_grid(tables: list[TableOf], every: bool = False) -> Grid | None:
    """The indexes that have counted something, the fullest first; None if there are none.

    Args:
        tables: those of the report.
        every: all of them, however many there are.
    """
    found = [one for one in tables if _counted(one.table)]
    if not found:
        return None
    ordered = sorted(found, key=_urgency, reverse=True)
    filling = sum(_fills(one.table) for one in found)
    shown = ordered if every or len(ordered) <= FEW else ordered[: min(max(filling, _FULLEST), FEW)]
    several = len({one.collection.paths for one in tables}) > 1
    rest = len(ordered) - len(shown)
    return Grid(
        f"Indexes, the fullest first: {_in_words([one.table for one in found])}",
        _FILLING_COLUMNS,
        tuple(_filling_row(one, several, every) for one in shown),
        frozenset(_FILLING_COLUMNS[2:]) - {"worst bucket"},
        f"... and {rest:,} more, none of them fuller ({LISTS_EACH})" if rest else "",
    ).without_empty_columns()


def index_row(table: TableReport, count: Callable[[int], str]) -> tuple[str, ...]:
    """The cells of one table that has an index, under ``INDEX_COLUMNS``.

    Args:
        table: a table that has an index.
        count: formats a number.
    """
    found = table.hashing
    assert found is not None
    counters = dict(found.counters)
    return (
        table.name,
        *(count(counters[name]) for name in _COUNTERS),
        "" if found.candidates is None else count(found.candidates),
        _worst_bucket(found),
        f"{found.longest_probe}",
        f"{(found.index_bytes or 0) / (found.rows_here or 1):.1f}",
    )


def _counted(table: TableReport) -> bool:
    return has_index(table) and table.hashing is not None and any(count for _, count in table.hashing.counters)


def _in_words(tables: list[TableReport]) -> str:
    """What happens in how many of the tables: ``1 table fills up, 5 tables evict ids``."""
    happens = {
        ("fills up", "fill up"): lambda table: _has_reason(table, "index_nearly_full"),
        ("shares rows", "share rows"): lambda table: _has_reason(table, "shared_answers"),
        ("evicts ids", "evict ids"): lambda table: _count(table, "evicted") > 0,
        ("forgets ids that wait", "forget ids that wait"): lambda table: _has_reason(table, "candidates_dropped"),
    }
    counts = {words: sum(map(is_so, tables)) for words, is_so in happens.items()}
    found = [f"{plural(count, 'table')} {words[count > 1]}" for words, count in counts.items() if count]
    return ", ".join(found) or "none fills up"


def _has_reason(table: TableReport, code: str) -> bool:
    return any(reason.code == code for reason in table.reasons)


def _count(table: TableReport, counter: str) -> int:
    return 0 if table.hashing is None else dict(table.hashing.counters)[counter]


def _fills(table: TableReport) -> bool:
    return any(reason.code in FILLING for reason in table.reasons)


def _urgency(one: TableOf) -> tuple[bool, float]:
    found = one.table.hashing
    assert found is not None
    return _fills(one.table), found.worst_bucket_occupancy or 0.0


def _filling_row(one: TableOf, several_collections: bool, every: bool) -> tuple[str, ...]:
    found = one.table.hashing
    assert found is not None
    counters = dict(found.counters)
    left = found.batches_until_full
    return (
        one.table.name,
        wording.name_of(one.collection.path) if several_collections else "",
        wording.count(found.ids_held or 0),
        wording.share(found.occupancy or 0.0),
        _worst_bucket(found),
        "" if found.room is None or found.evict else wording.count(found.room),
        "" if left is None else f"{wording.count(left)} {'batch' if left == 1 else 'batches'}",
        "" if found.suggested_rows is None else f"{found.suggested_rows:,}",
        *(wording.count(counters[name]) for name in ("ids_seen", "evicted", "shared_answers", "unseen_answers")),
        "" if found.candidates is None else wording.count(found.candidates),
        *(index_row(one.table, wording.count)[-2:] if every else ("", "")),
    )


def _worst_bucket(found: HashingReport) -> str:
    assert found.worst_bucket_occupancy is not None
    return "" if found.worst_bucket is None else f"{found.worst_bucket}: {wording.share(found.worst_bucket_occupancy)}"
