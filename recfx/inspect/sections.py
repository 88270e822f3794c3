"""What the indexes of a model have counted, and which of them fill up, as tables: for text and HTML."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from recfx.inspect import wording
from recfx.inspect.collection_rows import FEW, LISTS_EACH, SHARDING_COLUMNS, Grid, sharding_row, sharding_title, totals
from recfx.inspect.reason_rows import FILLING
from recfx.inspect.report_data import CollectionReport
from recfx.inspect.table_report import HashingReport, TableReport
from recfx.inspect.wording import few, groups_of, plural, runs_of

_COLUMNS = (
    "table", "collection", "features", "rows", "dim", "pooling", "type", "size", "hashing", "ids held", "kernel",
    "optimizer",
)  # fmt: skip
_NUMBERS = frozenset(("rows", "dim", "size"))
_USUAL_TYPE = "float32"  # groups of such tables need no column for it


@dataclass(frozen=True)
class TableOf:
    """A table, and the collection that it is in."""

    collection: CollectionReport
    table: TableReport


def tables_of(collections: Iterable[CollectionReport]) -> list[TableOf]:
    """All tables, in the order of the model."""
    return [TableOf(collection, table) for collection in collections for table in collection.tables]


def tables_grid(tables: list[TableOf], every: bool = False) -> Grid:
    """All tables.

    Args:
        tables: those of the report.
        every: a line for each, however many there are.
    """
    single = every or len(tables) <= FEW
    groups = [[one] for one in tables] if single else groups_of(tables, _key)
    title = f"Tables: {totals(one.table for one in tables)}"
    if len(groups) < len(tables):
        title += f", in {plural(len(groups), 'group')} of like ones ({LISTS_EACH})"
    several = len({one.collection.paths for one in tables}) > 1
    usual_type = not single and all(one.table.dtype == _USUAL_TYPE for one in tables)
    rows = tuple(_row(group, several, single, usual_type) for group in groups)
    return Grid(title, _COLUMNS, rows, _NUMBERS).without_empty_columns()


def sharding_grid(tables: list[TableOf], every: bool = False) -> Grid | None:
    """Where the parts of sharded tables are; None if no table is sharded."""
    sharded = [one.table for one in tables if one.table.sharding is not None]
    if not sharded:
        return None
    single = every or len(sharded) <= FEW
    groups = [[one] for one in sharded] if single else groups_of(sharded, _sharding_key)
    rows = tuple(sharding_row(group[0]) if len(group) == 1 else _sharding_group(group) for group in groups)
    return Grid(
        f"Where they are: {sharding_title(sharded)}; {_weights_by_rank(sharded)}",
        SHARDING_COLUMNS,
        rows,
        frozenset(SHARDING_COLUMNS[-3:]),
    )


def names_of(tables: list[TableReport]) -> str:
    """``table_0``, ``26: table_0..25``, or ``500 like table_0``."""
    runs = runs_of([table.name for table in tables])
    if len(tables) == 1:
        return tables[0].name
    return f"{len(tables):,}: {runs[0][0]}" if len(runs) == 1 else f"{len(tables):,} like {tables[0].name}"


def _row(group: list[TableOf], several_collections: bool, with_features: bool, usual_type: bool) -> tuple[str, ...]:
    first, tables = group[0].table, [one.table for one in group]
    owners = list(dict.fromkeys(wording.name_of(one.collection.path) for one in group))
    return (
        names_of(tables),
        "" if not several_collections else few(owners, 1),
        wording.listed(first.features, 2) if with_features else "",
        wording.between([table.rows for table in tables]),
        str(first.dim),
        first.pooling,
        "" if usual_type else first.dtype,
        wording.size(sum(table.bytes for table in tables)),
        wording.rules(first.hashing),
        wording.held(tables),
        first.kernel,
        wording.optimizer(first),
    )


def _key(one: TableOf) -> Hashable:
    """What like tables have in common; how they are sharded is in a table of its own."""
    table = one.table
    return (
        table.dim, table.pooling, table.dtype, table.device, wording.rules(table.hashing), table.kernel,
        table.optimizer, one.collection.status,
    )  # fmt: skip


def _sharding_key(table: TableReport) -> Hashable:
    found = table.sharding
    return None if found is None else (found.sharding_type, found.compute_kernel, found.bytes_here > 0)


def _sharding_group(tables: list[TableReport]) -> tuple[str, ...]:
    found = [table.sharding for table in tables if table.sharding is not None]
    ranks = sorted({shard.rank for one in found for shard in one.shards if shard.bytes})
    return (
        names_of(tables),
        found[0].sharding_type,
        found[0].compute_kernel,
        found[0].travels,
        "every rank" if found[0].is_replicated else f"ranks {few([str(rank) for rank in ranks], 4)}",
        wording.between([one.rows_here for one in found]),
        wording.between([one.columns_here for one in found]),
        wording.size(sum(one.bytes_here for one in found)),
    )


def _weights_by_rank(tables: list[TableReport]) -> str:
    """How evenly the weights lie on the ranks."""
    found = [table.sharding for table in tables if table.sharding is not None]
    sizes = dict.fromkeys(range(found[0].world_size), 0)
    for shard in (shard for one in found for shard in one.shards):
        sizes[shard.rank] = sizes.get(shard.rank, 0) + shard.bytes
    least, most = min(sizes.values()), max(sizes.values())
    if least == most:
        return f"{wording.size(most)} of weights on each rank"
    where = [str(rank) for rank, size in sizes.items() if size == most]
    return f"{wording.size(least)} to {wording.size(most)} of weights per rank, most on rank {few(where, 3)}"


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
