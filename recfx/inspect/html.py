"""The report as one HTML page: complete, without other files or scripts, and with everything from the model escaped.

It begins as the text does: with what matters, one row per reason, one line per group of like tables. What it says of
each single table, node and pass is folded up below, by collection.
"""

from __future__ import annotations

from collections.abc import Collection
from html import escape as escape_html

from recfx.inspect import wording
from recfx.inspect.grid import Grid, plural
from recfx.inspect.reason_rows import ReasonRow, holds_for, matter, notes, reason_rows
from recfx.inspect.report_data import CollectionReport, ReportData
from recfx.inspect.sections import LISTS_EACH, declined, details, overview, totals
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


def render_html(report: ReportData) -> str:
    """The whole page."""
    title = wording.headline(report)
    rows = reason_rows(report)
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
    for grid in overview(report.collections):
        parts += [f"<h2>{escape(_below(grid.title))}</h2>", *_grid(grid)]
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
    for grid in details(collection):
        parts += [f"<h3>{escape(grid.title)}</h3>"] if grid.title else []
        parts += _grid(grid)
    for one in collection.passes:
        changed = "" if one.modified else " (no change)"
        parts.append(f"<details><summary>graph after {escape(one.name)}{changed}</summary>{_pre(one.graph)}</details>")
    if collection.declined:
        parts.append(f"<details><summary>declined: {len(collection.declined):,}</summary>")
        parts += [*_grid(declined(collection)), "</details>"]
    return [*parts, "</details>"]


def _grid(grid: Grid) -> list[str]:
    numbers = [column in grid.numbers for column in grid.columns]
    lines = [f"<tr>{''.join(map(_cell, row, numbers))}</tr>" for row in grid.rows]
    below = [f"<p>{escape(_below(grid.more))}</p>"] if grid.more else []
    return [_frame(grid.columns, lines, grid.numbers), *below]


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
