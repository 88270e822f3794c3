"""The report for a terminal, a pipe or a log: what matters first, and of many rows the first."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from recfx.errors import Severity, printable
from recfx.inspect.report_data import ReportData
from recfx.inspect.sections import ReasonRow, headline, holds_for, reason_rows, sections, versions
from recfx.printing.grid import groups_of
from recfx.printing.text import rich_table

WIDTH = 120

_MOST_ROWS, _MOST_MESSAGES = 20, 2
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


def render(report: ReportData, width: int = WIDTH) -> Iterator[RenderableType]:
    """The parts of the report, from top to bottom; prose is wrapped at ``width``."""
    yield Text(headline(report), style="bold green" if report.ok else "bold red")
    yield Text(versions(report))
    verification = report.verification.text.removeprefix("verification: ")
    yield Text(f"verification: {verification if report.verification.ok is False else verification.splitlines()[0]}")
    codes = groups_of(reason_rows(report.reasons), lambda row: (row.reason.severity, row.reason.code))
    for rows in codes:
        if rows[0].reason.severity != Severity.INFO:
            yield from _reason(rows, width)
    for grid in sections(report):
        yield Text(f"\n{grid.title}", style="bold")
        yield rich_table(grid, _MOST_ROWS)
        if len(grid.rows) > _MOST_ROWS:
            yield Text(f"... and {len(grid.rows) - _MOST_ROWS:,} more (to_html() has all)")
        if grid.more:
            yield Text(grid.more)
    for rows in codes:
        if rows[0].reason.severity == Severity.INFO:
            yield from _reason(rows, width)


def _reason(rows: list[ReasonRow], width: int) -> Iterator[Text]:
    """One line that says what it is and for what it holds, then what it means."""
    first = rows[0].reason
    code = f"{first.severity}: {first.code}"
    head = Text(f"\n{code}: {holds_for([path for row in rows for path in row.paths])}")
    head.highlight_words([code], style=_STYLES[first.severity])
    yield head
    for row in rows[:_MOST_MESSAGES]:
        yield _prose(f"{holds_for(row.paths)}: " * (len(rows) > 1) + row.reason.message, width)
        if row.reason.what_to_do:
            yield _prose(f"What to do: {row.reason.what_to_do}", width)
    if len(rows) > _MOST_MESSAGES:
        yield _prose(f"... and {len(rows) - _MOST_MESSAGES:,} more (to_html() has all)", width)


def _prose(text: str, width: int) -> Text:
    return Text(textwrap.fill(printable(text), width, initial_indent="    ", subsequent_indent="    "))
