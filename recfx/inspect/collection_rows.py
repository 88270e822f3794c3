"""The collections of a report: one line each, or one line per group of like ones if there are many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recfx.inspect import wording
from recfx.inspect.report_data import CollectionReport
from recfx.inspect.table_report import ShardingReport, ShardReport, TableReport
from recfx.inspect.wording import few, groups_of, plural

LISTS_EACH = 'tables="all" lists each'
"""What a title or ``more`` says of what is left out; the page, which leaves nothing out, says something else."""


@dataclass(frozen=True)
class Grid:
    """One table of the report.

    Args:
        title: what it shows, in one line.
        columns: their names; the first names the row.
        rows: cells, one per column. Cells never contain line breaks.
        numbers: names of the columns that are aligned on the right.
        more: a line below, for what was left out.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str] = frozenset()
    more: str = ""

    def without_empty_columns(self) -> Grid:
        """This grid without the columns that have nothing in any row."""
        kept = [place for place in range(len(self.columns)) if any(row[place] for row in self.rows)]
        return Grid(
            self.title,
            tuple(self.columns[place] for place in kept),
            tuple(tuple(row[place] for place in kept) for row in self.rows),
            self.numbers,
            self.more,
        )


FEW = 12  # up to this many collections or tables have a line each

_USUAL = "EmbeddingBagCollection"
_COLUMNS = ("collection", "class", "status", "found", "tables", "size", "where")


def collections_grid(collections: tuple[CollectionReport, ...], every: bool = False) -> Grid:
    """All collections.

    Args:
        collections: those of the report.
        every: a line for each, however many there are.
    """
    alike = groups_of(collections, lambda one: (one.kind, one.status, one.reason, one.found))
    groups = [[one] for one in collections] if every or len(collections) <= FEW else alike
    rows = tuple(_row(group, all(one.kind == _USUAL for one in collections)) for group in groups)
    return Grid("Collections", _COLUMNS, rows, frozenset(("tables", "size"))).without_empty_columns()


def totals(tables: Iterable[TableReport]) -> str:
    """``26 tables, 1.6 MiB on cpu``."""
    tables = tuple(tables)
    devices = sorted({table.device for table in tables if table.device})
    place = f" on {', '.join(devices)}" if devices else ""
    return f"{plural(len(tables), 'table')}, {wording.size(sum(table.bytes for table in tables))}{place}"


def _row(group: list[CollectionReport], usual: bool) -> tuple[str, ...]:
    first, tables = group[0], [table for one in group for table in one.tables]
    names = [" = ".join(map(wording.name_of, one.paths)) for one in group]
    places = list(dict.fromkeys(place for one in group if (place := wording.place(one))))
    return (
        names[0] if len(group) == 1 else f"{len(group):,}: {few(names, 3)}",
        "" if usual else first.kind,
        f"{first.status}: {first.reason}" if first.reason else first.status,
        first.found,
        f"{len(tables):,}",
        wording.size(sum(table.bytes for table in tables)),
        places[0] if len(places) == 1 else plural(len(places), "place") if places else "",
    )


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
