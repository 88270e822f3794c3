"""The collections of a report: one line each, or one line per group of like ones if there are many."""

from __future__ import annotations

from collections.abc import Iterable

from recfx.inspect import wording
from recfx.inspect.collection_report import CollectionReport
from recfx.inspect.grid import Grid
from recfx.inspect.names import few, groups_of, plural
from recfx.inspect.table_report import TableReport

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
