"""The report as one HTML page: complete, without other files, and with everything from the model escaped.

It begins as the text does: with what matters, one row per reason, one line per group of like tables. What it says about
each single table, node and pass is folded up below, by collection. A small script filters and sorts the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from recfx.errors import plural
from recfx.inspect import wording
from recfx.inspect.reason_rows import ReasonRow, holds_for, matter, notes, reason_rows
from recfx.inspect.report_data import CollectionReport, ReportData
from recfx.inspect.sections import LISTS_EACH, declined, details, overview, totals
from recfx.printing.page import escape, fragment, frame, heading, link, page, pre, table

_REASON_COLUMNS = ("severity", "code", "holds for", "message", "what to do")


def render_html(report: ReportData, picture: str = "") -> str:
    """The whole page; ``picture`` is the address of a page of ``recfx.draw`` with the same names, for links."""
    parts = [f"<p>{escape(wording.versions(report))}, report version {escape(report.version)}</p>"]
    parts += _summary(report, _in_page)
    if report.collections:
        parts.append("<h2>Collections, table by table</h2>")
    used: set[str] = set()
    for collection in report.collections:
        parts += _details(collection, used, picture)
    return page(wording.headline(report), "ok" if report.ok else "error", parts, has_filter=True)


def render_fragment(report: ReportData) -> str:
    """What a notebook shows: what matters, and the lists of collections and tables, without what is folded up below."""
    title = heading(wording.headline(report), "ok" if report.ok else "error")
    return fragment([title, *_summary(report, str)])


def _summary(report: ReportData, said: Callable[[str], str]) -> list[str]:
    """What the text says; ``said`` changes what it says about what is left out."""
    rows, parts = reason_rows(report), []
    if important := matter(rows):
        parts += ["<h2>Refusals and warnings</h2>", _reasons(important)]
    parts.append(f"<h2>Verification</h2>{pre(report.verification.text)}")
    for grid in overview(report.collections):
        parts += [f"<h2>{escape(said(grid.title))}</h2>", *table(replace(grid, more=said(grid.more)))]
    if minor := notes(rows):
        parts += ["<h2>Notes</h2>", _reasons(minor)]
    return parts


def _new(name: str, used: set[str]) -> str:
    """The name if nothing in the page has it yet; otherwise ``""``."""
    if name in used:
        return ""
    used.add(name)
    return name


def _in_page(text: str) -> str:
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
        f'<tr class="{severity}"><td>{cells[0]}</td><td>{cells[1]}</td>'
        + "".join(
            f'<td class="prose" data-column="{column}">{cell}</td>'
            for column, cell in zip(columns[2:], cells[2:], strict=False)
        )
        + "</tr>"
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


def _details(collection: CollectionReport, used: set[str], picture: str) -> list[str]:
    """Everything about one collection; ``used`` are the names in the page, of which a link leads to the first."""
    names = " = ".join(map(wording.name_of, collection.paths))
    title = escape(f"{names}: {collection.status}, {totals(collection.tables)}")
    name = escape(_new(f"collection={collection.path}", used))
    parts = [f'<details id="{name}"><summary>{title}</summary>']
    parts += [f"<p>{link(picture, 'collection', collection.path, 'in the picture')}</p>"] if picture else []
    for grid in details(collection):
        parts += [f"<h3>{escape(grid.title)}</h3>"] if grid.title else []
        is_named = grid.columns[0] in ("table", "node")
        ids = [_new(f"{grid.columns[0]}={row[0]}", used) if is_named else "" for row in grid.rows]
        parts += table(grid, ids=ids, linked=picture if is_named else "")
    for step in collection.passes:
        changed = "" if step.modified else " (no change)"
        parts.append(f"<details><summary>graph after {escape(step.name)}{changed}</summary>{pre(step.graph)}</details>")
    if collection.declined:
        parts.append(f"<details><summary>declined: {len(collection.declined):,}</summary>")
        parts += [*table(declined(collection)), "</details>"]
    return [*parts, "</details>"]
