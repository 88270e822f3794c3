"""The report for a terminal: plain text of fixed width, problems first, many similar items as a few and a count."""

from __future__ import annotations

import io
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from recfx.diagnostics import Diagnostic
from recfx.inspect import wording
from recfx.inspect.collection_report import CollectionReport
from recfx.inspect.index_columns import INDEX_COLUMNS, has_index, index_row
from recfx.inspect.report_data import ReportData
from recfx.inspect.sharding_columns import SHARDING_COLUMNS, sharding_row, sharding_title
from recfx.inspect.table_report import TableReport

WIDTH = 120

_Item = TypeVar("_Item")

_FEW = 12  # up to this many rows are always listed
_EXAMPLES = 3  # rows listed of each kind if there are more
_MOST_GROUPS = 12
_LONGEST_PLACE = 26


def render_text(report: ReportData) -> str:
    """The whole report; see :class:`ReportData`."""
    parts: list[RenderableType] = [
        Text(wording.headline(report)),
        Text(wording.versions(report)),
        Text(f"verification: {report.verification.text.removeprefix('verification: ')}"),
    ]
    if report.collections:
        parts += [Text("\nCollections"), _collections(report.collections)]
    if report.reasons:
        parts += [Text("\nReasons"), *_reasons(report.reasons)]
    described = [collection for collection in report.collections if collection.tables or collection.nodes]
    shown = described if len(described) <= _FEW else _examples(described)
    for collection in shown:
        parts += _details(collection)
    if len(described) > len(shown):
        rest = [collection for collection in described if not any(collection is one for one in shown)]
        tables = [table for collection in rest for table in collection.tables]
        parts.append(Text(f"\n... and {len(rest):,} more collections, {_totals(tables)}: see .to_json() or .to_html()"))
    return _plain(parts)


def _collections(collections: tuple[CollectionReport, ...]) -> Table:
    table = _grid("collection", "class", "status", "found", "where", "tables", "size")
    groups = _groups(collections, lambda one: (one.kind, one.status, one.reason, one.found))
    for group in groups:
        shown = group if len(collections) <= _FEW else group[:_EXAMPLES]
        for one in shown:
            path = wording.name_of(one.path) + "".join(f"\n= {wording.name_of(alias)}" for alias in one.paths[1:])
            status = f"{one.status}\n{one.reason}" if one.reason else one.status
            place = wording.in_lines(wording.place(one), _LONGEST_PLACE)
            tables, total = f"{len(one.tables):,}", wording.size(sum(table.bytes for table in one.tables))
            table.add_row(path, one.kind, status, one.found, place, tables, total)
        if len(shown) < len(group):
            total = wording.size(sum(table.bytes for one in group[len(shown) :] for table in one.tables))
            tables = f"{sum(len(one.tables) for one in group[len(shown) :]):,}"
            more = f"... {len(group) - len(shown):,} more like these"
            table.add_row(more, group[0].kind, group[0].status, group[0].found, "", tables, total)
    return table


def _reasons(reasons: tuple[Diagnostic, ...]) -> list[RenderableType]:
    """One paragraph per code and advice, with the first few modules that it is about."""
    parts: list[RenderableType] = []
    for same_code in _groups(reasons, lambda one: (one.severity, one.code)):
        groups = _groups(same_code, lambda one: (one.message, one.what_to_do))
        for group in groups[:_EXAMPLES]:
            paths = wording.listed(tuple(wording.name_of(one.path) for one in group))
            parts.append(Text(f"  {group[0].severity}: {group[0].code}: {paths}"))
            parts.append(Padding(Text(group[0].message), (0, 0, 0, 6)))
            if group[0].what_to_do:
                parts.append(Padding(Text(f"What to do: {group[0].what_to_do}"), (0, 0, 0, 6)))
        if len(groups) > _EXAMPLES:
            count = sum(len(group) for group in groups[_EXAMPLES:])
            parts.append(Text(f"  {same_code[0].severity}: {same_code[0].code}: ... and {count:,} more"))
    return parts


def _details(collection: CollectionReport) -> list[RenderableType]:
    parts: list[RenderableType] = [
        Text(f"\n{wording.name_of(collection.path)}: {collection.status}, {_totals(collection.tables)}"),
        _tables(collection.tables),
    ]
    if title := sharding_title(collection.tables):
        parts += [Text(f"  {title}"), _sharding([table for table in collection.tables if table.sharding is not None])]
    if indexed := [table for table in collection.tables if has_index(table)]:
        parts += [Text("  indexes, with what they have counted so far"), _indexes(indexed)]
    if collection.nodes:
        sizes = _grid("node", "shape", "bytes", "kernel", "made by")
        for node in collection.nodes[: 2 * _FEW]:
            size = wording.expression(node.bytes)
            sizes.add_row(node.name, wording.shape(node.shape), size, node.kernel, node.made_by)
        if len(collection.nodes) > 2 * _FEW:
            sizes.add_row(f"... {len(collection.nodes) - 2 * _FEW:,} more", "", "", "", "")
        ranks = ", W (ranks)" if title else ""
        parts += [
            Text(f"  sizes, in B (batch size){ranks} and L_f (mean number of ids of feature f per sample)"),
            sizes,
        ]
    return parts


def _tables(tables: tuple[TableReport, ...]) -> Table:
    grid = _grid("table", "features", "rows", "dim", "pooling", "type", "size", "hashing", "kernel", "optimizer")
    groups = _groups(tables, _table_key)
    for group in groups[:_MOST_GROUPS] if len(tables) > _FEW else groups:
        shown = group if len(tables) <= _FEW else group[:_EXAMPLES]
        for one in shown:
            features, size = wording.listed(one.features, 2), wording.size(one.bytes)
            cells = (
                one.pooling,
                one.dtype,
                size,
                wording.hashing(one.hashing, wording.is_here(one)),
                one.kernel,
                wording.optimizer(one),
            )
            grid.add_row(one.name, features, f"{one.rows:,}", str(one.dim), *cells)
        rest = group[len(shown) :]
        if rest:
            rows, total = _between(one.rows for one in rest), wording.size(sum(one.bytes for one in rest))
            grid.add_row(f"... {len(rest):,} more", "", rows, str(rest[0].dim), rest[0].pooling, rest[0].dtype, total)
    if len(tables) > _FEW and len(groups) > _MOST_GROUPS:
        others = [one for group in groups[_MOST_GROUPS:] for one in group]
        grid.add_row(f"... {len(others):,} others", *[""] * 5, wording.size(sum(one.bytes for one in others)))
    return grid


def _sharding(tables: list[TableReport]) -> Table:
    """A few of each kind if there are many."""
    grid = _grid(*SHARDING_COLUMNS)
    groups = [tables] if len(tables) <= _FEW else _groups(tables, _sharding_key)[:_MOST_GROUPS]
    shown = [table for group in groups for table in (group if len(tables) <= _FEW else group[:_EXAMPLES])]
    for one in shown:
        grid.add_row(*sharding_row(one))
    if len(shown) < len(tables):
        grid.add_row(f"... {len(tables) - len(shown):,} more")
    return grid


def _sharding_key(table: TableReport) -> Hashable:
    found = table.sharding
    return None if found is None else (found.sharding_type, found.compute_kernel, found.bytes_here > 0)


def _indexes(tables: list[TableReport]) -> Table:
    """The fullest ones if there are many."""
    grid = _grid(*INDEX_COLUMNS)
    shown = tables if len(tables) <= _FEW else sorted(tables, key=_fullness, reverse=True)[:_EXAMPLES]
    for one in shown:
        grid.add_row(*index_row(one, wording.count))
    if len(shown) < len(tables):
        grid.add_row(f"... {len(tables) - len(shown):,} more")
    return grid


def _fullness(table: TableReport) -> float:
    return 0.0 if table.hashing is None else table.hashing.worst_bucket_occupancy or 0.0


def _examples(collections: list[CollectionReport]) -> list[CollectionReport]:
    """A few of each kind."""
    groups = _groups(collections, lambda one: (one.kind, one.status, frozenset(map(_table_key, one.tables))))
    return [collection for group in groups for collection in group[:_EXAMPLES]][:_FEW]


def _table_key(table: TableReport) -> Hashable:
    mode = None if table.hashing is None else table.hashing.mode
    return table.dim, table.pooling, table.dtype, table.device, mode, table.kernel, table.optimizer


def _totals(tables: Iterable[TableReport]) -> str:
    tables = tuple(tables)
    devices = sorted({table.device for table in tables if table.device})
    place = f" on {', '.join(devices)}" if devices else ""
    count = f"{len(tables):,} {'table' if len(tables) == 1 else 'tables'}"
    return f"{count}, {wording.size(sum(table.bytes for table in tables))}{place}"


def _between(numbers: Iterable[int]) -> str:
    numbers = sorted(numbers)
    return f"{numbers[0]:,}" if numbers[0] == numbers[-1] else f"{numbers[0]:,} to {numbers[-1]:,}"


def _groups(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    """Items grouped by key, in order of first appearance."""
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _grid(*columns: str) -> Table:
    grid = Table(box=box.ASCII, padding=(0, 1), pad_edge=False, show_edge=False)
    for column in columns:
        right = column in ("rows", "dim", "size", "tables", *INDEX_COLUMNS[1:], *SHARDING_COLUMNS[-3:])
        grid.add_column(
            column, justify="right" if right else "left", overflow="fold", no_wrap=right or column == "where"
        )
    return grid


def _plain(parts: Iterable[RenderableType]) -> str:
    """Rendered without colours, whatever the terminal."""
    console = Console(
        file=io.StringIO(),
        width=WIDTH,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
        markup=False,  # the user's names may look like markup
        emoji=False,
        highlight=False,
    )
    for part in parts:
        console.print(part)
    output = console.file
    assert isinstance(output, io.StringIO)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())
