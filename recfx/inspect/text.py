"""The report for a terminal: what matters first, many similar items as one line, no name or ``file:line`` broken.

As plain text it has a fixed width and no colours, so that it is the same in every pipe and log. Reasons begin their
line with their severity and code. Prose is wrapped between words; a name that is longer than a line stays whole.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from recfx.collections.kinds import table_in
from recfx.errors import Severity, printable
from recfx.inspect import wording
from recfx.inspect.reason_rows import Finding, ReasonRow, matter, notes, reason_rows
from recfx.inspect.report_data import ReportData
from recfx.inspect.sections import LEGEND, node_grids, overview
from recfx.printing.grid import Grid, few, groups_of

WIDTH = 120

_NARROWEST = 40
_MOST_FINDINGS = 2  # of one reason
_MOST_KINDS = 6  # of findings, if there are more
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


def render_text(report: ReportData, every: bool = False) -> str:
    """The whole report as plain text.

    Args:
        report: see :class:`ReportData`.
        every: a line for each table, collection and message, however many there are.
    """
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
    for part in render(report, every, WIDTH, box.ASCII):
        console.print(part, soft_wrap=True)  # lines have their length already; longer ones stay whole
    output = console.file
    assert isinstance(output, io.StringIO)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def render(report: ReportData, every: bool, width: int, lines: box.Box = box.SIMPLE_HEAD) -> Iterator[RenderableType]:
    """The parts of the report, from top to bottom.

    Args:
        report: see :class:`ReportData`.
        every: as for ``render_text``.
        width: of the terminal.
        lines: how tables are drawn.
    """
    width = max(width, _NARROWEST)
    rows = reason_rows(report, every)
    yield Text(wording.headline(report), style="bold green" if report.ok else "bold red")
    yield Text(wording.versions(report))
    yield Text(f"verification: {_verification(report, every)}")
    for row in matter(rows):
        yield from _reason(row, width, every)
    graphs, more = node_grids(report.collections, every)
    for section in [*overview(report.collections, every), *graphs]:
        yield from _grid(section, width, lines)
    if more:
        yield Text(f"\n{more}")
    if graphs:
        yield Text(LEGEND)
    if minor := notes(rows):
        yield Text("\nNotes", style="bold")
        for row in minor:
            yield from _reason(row, width, every)


def _verification(report: ReportData, every: bool) -> str:
    """One line if all is well."""
    text = report.verification.text.removeprefix("verification: ")
    return text if every or report.verification.ok is False else text.splitlines()[0]


def _reason(row: ReasonRow, width: int, every: bool) -> Iterator[Text]:
    """One line that says what it is and for what it holds, then what it means."""
    lines = _wrapped(f"{row.severity}: {row.code}: {row.holds_for}", width, "", "    ")
    head = Text(("\n" if row.severity != Severity.INFO else "") + "\n".join(lines))
    head.highlight_words([f"{row.severity}: {row.code}"], style=_STYLES[row.severity])
    yield head
    shown = row.findings if every or len(row.findings) <= _MOST_FINDINGS else _one_of_each(row.findings)
    for finding in shown:
        yield from _prose(_where(finding, row) + finding.message, width)
        if finding.what_to_do and row.advice is None:
            yield from _prose(f"What to do: {finding.what_to_do}", width)
    if len(shown) < len(row.findings):
        rest = len(row.findings) - len(shown)
        yield from _prose(f'... and {rest:,} more (tables="all" lists each)', width)
    if row.advice:
        yield from _prose(f"What to do: {row.advice}", width)


def _one_of_each(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The first of those whose advice differs in figures alone."""
    alike = groups_of(findings, lambda finding: re.sub(r"\d+", "", finding.what_to_do))
    return tuple(same[0] for same in alike[:_MOST_KINDS])


def _where(finding: Finding, row: ReasonRow) -> str:
    """Which of the modules a message is about, if there are several messages."""
    if len(row.findings) == 1:
        return ""
    names = [(table_in(path)[1] or path) or "(root)" for path in finding.paths]
    return f"{few(names, 3)}: "


def _prose(text: str, width: int) -> Iterator[Text]:
    yield Text("\n".join(_wrapped(text, width, "    ", "    ")))


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _grid(grid: Grid, width: int, lines: box.Box) -> Iterator[RenderableType]:
    """A table, or, if that is wider than the terminal, a few lines per row."""
    yield Text("\n" + "\n".join(_wrapped(grid.title, width, "", "    ")), style="bold")
    grid = replace(grid, rows=tuple(tuple(map(printable, row)) for row in grid.rows), more=printable(grid.more))
    widths = [max(map(cell_len, column)) for column in zip(grid.columns, *grid.rows, strict=True)]
    if sum(widths) + 3 * (len(widths) - 1) > width:
        for row in grid.rows:
            yield Text(row[0])
            values = [f"{name} {cell}" for name, cell in zip(grid.columns[1:], row[1:], strict=True) if cell]
            yield from _prose("; ".join(values), width)
    else:
        yield _table(grid, lines)
    if grid.more:
        yield Text(grid.more)


def _table(grid: Grid, lines: box.Box) -> Table:
    table = Table(box=lines, padding=(0, 1), pad_edge=False, show_edge=False)
    for column in grid.columns:
        table.add_column(column, justify="right" if column in grid.numbers else "left", no_wrap=True)
    for row in grid.rows:
        table.add_row(*map(Text, row))
    return table
