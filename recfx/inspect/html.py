"""The report as one HTML page: complete, without other files or scripts, and with everything from the model escaped.

It begins as the text does: with what matters, one row per reason, one line per group of like tables. What it says about
each single table, node and pass is folded up below, by collection.
"""

from __future__ import annotations

from dataclasses import replace

from recfx.inspect import wording
from recfx.inspect.reason_rows import ReasonRow, holds_for, matter, notes, reason_rows
from recfx.inspect.report_data import CollectionReport, ReportData
from recfx.inspect.sections import LISTS_EACH, declined, details, overview, totals
from recfx.printing.grid import Grid, plural
from recfx.printing.page import escape, frame, page, pre, table

_REASON_COLUMNS = ("severity", "code", "holds for", "message", "what to do")


def render_html(report: ReportData) -> str:
    """The whole page."""
    title = wording.headline(report)
    rows = reason_rows(report)
    parts = [f"<p>{escape(wording.versions(report))}, report version {escape(report.version)}</p>"]
    if important := matter(rows):
        parts += ["<h2>Refusals and warnings</h2>", _reasons(important)]
    parts.append(f"<h2>Verification</h2>{pre(report.verification.text)}")
    for grid in overview(report.collections):
        parts += [f"<h2>{escape(_below(grid.title))}</h2>", *_grid(grid)]
    if minor := notes(rows):
        parts += ["<h2>Notes</h2>", _reasons(minor)]
    if report.collections:
        parts.append("<h2>Collections, table by table</h2>")
    for collection in report.collections:
        parts += _details(collection)
    return page(title, "ok" if report.ok else "error", parts)


def _below(text: str) -> str:
    return text.replace(LISTS_EACH, "each is listed below")


def _reasons(reasons: list[ReasonRow]) -> str:
    rows = []
    for reason in reasons:
        messages = [_message(reason, place) for place in range(len(reason.findings))]
        paths = list(dict.fromkeys(path for finding in reason.findings for path in finding.paths))
        names = holds_for(paths) if len(paths) > 1 else ""
        cells = (
            escape(reason.severity),
            escape(reason.code),
            _folded(reason.holds_for, [] if reason.holds_for.endswith(names) else [f"<div>{escape(names)}</div>"]),
            messages[0] if len(messages) == 1 else _folded(plural(len(messages), "message"), messages),
            escape(reason.advice if reason.advice is not None else "see the messages"),
        )
        rows.append((reason.severity, cells))
    advice = any(cells[-1] for _, cells in rows)
    columns = _REASON_COLUMNS if advice else _REASON_COLUMNS[:-1]
    lines = [
        f'<tr class="{severity}">{"".join(f"<td>{cell}</td>" for cell in cells[: len(columns)])}</tr>'
        for severity, cells in rows
    ]
    return frame(columns, lines)


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
    for step in collection.passes:
        changed = "" if step.modified else " (no change)"
        parts.append(f"<details><summary>graph after {escape(step.name)}{changed}</summary>{pre(step.graph)}</details>")
    if collection.declined:
        parts.append(f"<details><summary>declined: {len(collection.declined):,}</summary>")
        parts += [*_grid(declined(collection)), "</details>"]
    return [*parts, "</details>"]


def _grid(grid: Grid) -> list[str]:
    return table(replace(grid, more=_below(grid.more)))
