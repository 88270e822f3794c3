"""The report as one HTML page: complete, without other files or scripts, and with everything from the model escaped.

It begins as the text does: with what matters, one row per reason, one line per group of like tables. What it says of
each single table, node and pass is folded up below, by collection.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from html import escape as escape_html

from recfx.inspect import wording
from recfx.inspect.collection_rows import (
    LISTS_EACH,
    SHARDING_COLUMNS,
    Grid,
    collections_grid,
    sharding_row,
    sharding_title,
    totals,
)
from recfx.inspect.node_rows import LEGEND
from recfx.inspect.reason_rows import ReasonRow, codes_of, holds_for, matter, notes, reason_rows
from recfx.inspect.report_data import CollectionReport, ReportData
from recfx.inspect.sections import (
    INDEX_COLUMNS,
    filling_grid,
    has_index,
    index_row,
    sharding_grid,
    tables_grid,
    tables_of,
)
from recfx.inspect.table_report import TableReport
from recfx.inspect.wording import plural
from recfx.ir.names import printable

_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --page: #fff; --line: #ccc; --head: #f2f2f2; --code: #f7f7f7;
  --ok: #176b2c; --error: #a51414; --warning: #8a5a00; --info: #444; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e4e4; --page: #16181b; --line: #444; --head: #24272b;
  --code: #1e2124; --ok: #6fd08c; --error: #ff8f8f; --warning: #f0c060; --info: #b8b8b8; } }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 96em; padding: 0 1em; color: var(--text);
  background: var(--page); }
h1, h2, h3, summary { overflow-wrap: anywhere; }
.scroll { overflow: auto; max-height: 85vh; margin: .5em 0 1.5em; }
:focus-visible { outline: 2px solid var(--info); }
table { border-collapse: separate; border-spacing: 0; border-top: 1px solid var(--line);
  border-left: 1px solid var(--line); }
th, td { border-right: 1px solid var(--line); border-bottom: 1px solid var(--line); padding: .2em .6em;
  text-align: left; vertical-align: top; max-width: 36em; overflow-wrap: break-word; }
th { background: var(--head); white-space: nowrap; position: sticky; top: 0; }
.number { text-align: right; white-space: nowrap; }
pre { background: var(--code); overflow-x: auto; padding: .6em; }
details { margin: .3em 0; }
summary { cursor: pointer; }
.ok { color: var(--ok); } .error { color: var(--error); }
tr.error td:nth-child(-n+2) { color: var(--error); font-weight: 600; }
tr.warning td:nth-child(-n+2) { color: var(--warning); font-weight: 600; }
"""

_REASON_COLUMNS = ("severity", "code", "holds for", "message", "what to do")
_TABLE_COLUMNS = (
    "table", "features", "rows", "dim", "pooling", "type", "device", "size",
    "hashing", "kernel", "passed over", "optimizer", "reasons",
)  # fmt: skip
_FORECAST_COLUMNS = ("usable", "room", "batches until full", "suggested rows")
_NUMBERS = frozenset(("rows", "dim", "size", *INDEX_COLUMNS[1:], *_FORECAST_COLUMNS))
_NODE_COLUMNS = ("node", "kind", "shape", "bytes", "type", "device", "kernel", "made by")


def render_html(report: ReportData) -> str:
    """The whole page."""
    title = wording.headline(report)
    rows, tables = reason_rows(report), tables_of(report.collections)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f'<h1 class="{"ok" if report.ok else "error"}">{escape(title)}</h1>',
        f"<p>{escape(wording.versions(report))}, report version {escape(report.version)}</p>",
    ]
    if found := matter(rows):
        parts += ["<h2>Refusals and warnings</h2>", _reasons(found)]
    parts.append(f"<h2>Verification</h2>{_pre(report.verification.text)}")
    grids = [filling_grid(tables), collections_grid(report.collections) if report.collections else None]
    grids += [tables_grid(tables) if tables else None, sharding_grid(tables)]
    for grid in grids:
        if grid is not None:
            parts += [f"<h2>{escape(_below(grid.title))}</h2>", _grid(grid)]
            if grid.more:
                parts.append(f"<p>{escape(_below(grid.more))}</p>")
    if found := notes(rows):
        parts += ["<h2>Notes</h2>", _reasons(found)]
    if report.collections:
        parts.append("<h2>Collections, table by table</h2>")
    for collection in report.collections:
        parts += _details(collection)
    return "\n".join([*parts, "</body></html>"]) + "\n"


def escape(text: str) -> str:
    """The text as it is read in the page, which can be written in any encoding of Unicode."""
    return escape_html(printable(text))


def _below(text: str) -> str:
    return text.replace(LISTS_EACH, "each is listed below")


def _pre(text: str) -> str:
    return f'<pre tabindex="0">{escape_html(printable(text, keep=chr(10)))}</pre>'


def _reasons(found: list[ReasonRow]) -> str:
    rows = []
    for one in found:
        messages = [_message(one, place) for place in range(len(one.findings))]
        paths = list(dict.fromkeys(path for finding in one.findings for path in finding.paths))
        all_names = holds_for(paths) if len(paths) > 1 else ""
        cells = (
            escape(one.severity),
            escape(one.code),
            _folded(one.holds_for, [] if one.holds_for.endswith(all_names) else [f"<div>{escape(all_names)}</div>"]),
            messages[0] if len(messages) == 1 else _folded(plural(len(messages), "message"), messages),
            escape(one.advice if one.advice is not None else "see the messages"),
        )
        rows.append((one.severity, cells))
    advice = any(cells[-1] for _, cells in rows)
    columns = _REASON_COLUMNS if advice else _REASON_COLUMNS[:-1]
    lines = [
        f'<tr class="{severity}">{"".join(f"<td>{cell}</td>" for cell in cells[: len(columns)])}</tr>'
        for severity, cells in rows
    ]
    return _frame(columns, lines)


def _message(row: ReasonRow, place: int) -> str:
    finding = row.findings[place]
    if len(row.findings) == 1:
        return escape(finding.message)
    advice = "" if row.advice is not None else f" What to do: {finding.what_to_do}"
    return f"<div>{escape(f'{holds_for(list(finding.paths))}: {finding.message}{advice}')}</div>"


def _folded(summary: str, lines: list[str]) -> str:
    if not lines:
        return escape(summary)
    return f"<details><summary>{escape(summary)}</summary>{''.join(lines)}</details>"


def _details(collection: CollectionReport) -> list[str]:
    names = " = ".join(map(wording.name_of, collection.paths))
    parts = [f"<details><summary>{escape(f'{names}: {collection.status}, {totals(collection.tables)}')}</summary>"]
    where = f"{collection.file}:{collection.line}" if collection.file else "unknown"
    facts = (collection.kind, collection.found, where, collection.reason, collection.message, collection.what_to_do)
    parts.append(_table(("class", "found", "where", "reason", "message", "what to do"), [facts]))
    if collection.tables:
        parts.append(_table(_TABLE_COLUMNS, _table_rows(collection)))
    if title := sharding_title(collection.tables):
        parts.append(f"<h3>{escape(title)}</h3>")
        sharded = [table for table in collection.tables if table.sharding is not None]
        parts.append(_table(SHARDING_COLUMNS, (sharding_row(table, most=64) for table in sharded)))
    if indexed := [table for table in collection.tables if has_index(table)]:
        columns = (*INDEX_COLUMNS, *_FORECAST_COLUMNS)
        parts.append(
            _table(columns, ((*index_row(table, "{:,}".format), *_forecast_cells(table)) for table in indexed))
        )
    if collection.nodes:
        rows = (
            (
                node.name, node.kind, wording.shape(node.shape), wording.expression(node.bytes),
                node.dtype, node.device, node.kernel, node.made_by,
            )
            for node in collection.nodes
        )  # fmt: skip
        parts += [_table(_NODE_COLUMNS, rows), f"<p>{escape(LEGEND)}</p>"]
    for one in collection.passes:
        changed = "" if one.modified else " (no change)"
        parts.append(f"<details><summary>graph after {escape(one.name)}{changed}</summary>{_pre(one.graph)}</details>")
    if collection.declined:
        found = [(one.by, one.code, one.message, one.node) for one in collection.declined]
        parts.append(f"<details><summary>declined: {len(found):,}</summary>")
        parts.append(_table(("by", "reason", "message", "node"), found) + "</details>")
    return [*parts, "</details>"]


def _table_rows(collection: CollectionReport) -> Iterable[tuple[str, ...]]:
    for one in collection.tables:
        yield (
            one.name,
            ", ".join(one.features),
            f"{one.rows:,}",
            str(one.dim),
            one.pooling,
            one.dtype,
            one.device,
            wording.size(one.bytes),
            wording.hashing(one.hashing, wording.is_here(one)),
            one.kernel,
            " ".join(f"{declined.by}: {declined.message}" for declined in one.kernels_passed_over),
            one.optimizer,
            codes_of(one.reasons),
        )


def _forecast_cells(table: TableReport) -> tuple[str, ...]:
    found = table.hashing
    assert found is not None
    numbers = (found.room, found.batches_until_full, found.suggested_rows)
    usable = "" if found.usable_share is None else wording.share(found.usable_share)
    return usable, *("" if number is None else f"{number:,}" for number in numbers)


def _grid(grid: Grid) -> str:
    return _table(grid.columns, grid.rows, grid.numbers)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], numbers: Collection[str] = _NUMBERS) -> str:
    """A table of texts, without columns that have nothing in any row."""
    grid = Grid("", columns, tuple(rows), frozenset(numbers)).without_empty_columns()
    right = [column in numbers for column in grid.columns]
    cells = ("".join(map(_cell, row, right)) for row in grid.rows)
    return _frame(grid.columns, [f"<tr>{row}</tr>" for row in cells], grid.numbers)


def _cell(text: str, number: bool) -> str:
    return f'<td class="number">{escape(text)}</td>' if number else f"<td>{escape(text)}</td>"


def _frame(columns: tuple[str, ...], rows: list[str], numbers: Collection[str] = ()) -> str:
    head = "".join(
        f'<th scope="col"{" class=number" if column in numbers else ""}>{escape(column)}</th>' for column in columns
    )
    # What is wider or higher than the window scrolls by itself, also with the keyboard.
    return "\n".join(
        [
            f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(columns[0])}">'
            f"<table><thead><tr>{head}</tr></thead><tbody>",
            *rows,
            "</tbody></table></div>",
        ]
    )
