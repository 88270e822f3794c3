"""The report for a terminal: what matters first, many similar items as one line, no name or ``file:line`` broken.

As plain text it has no colours, prose of a fixed width, and tables with all of their columns, so that it is the same in
every pipe and log. Reasons begin their line with their severity and code. Prose is wrapped between words; a name that
is longer than a line stays whole.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from recfx.collections.kinds import table_in
from recfx.errors import Severity, few, printable
from recfx.inspect import wording
from recfx.inspect.reason_rows import Finding, ReasonRow, matter, notes, reason_rows
from recfx.inspect.report_data import ReportData
from recfx.inspect.sections import LEGEND, SPARE, node_grids, overview
from recfx.printing.grid import Grid, groups_of
from recfx.printing.lines import to_lines

WIDTH = 120

_NARROWEST = 20
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
    for part in render(report, every, None):
        console.print(part, soft_wrap=True)  # lines have their length already; longer ones stay whole
    output = console.file
    assert isinstance(output, io.StringIO)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def render(report: ReportData, every: bool, room: int | None) -> Iterator[Text]:
    """The parts of the report, from top to bottom.

    Args:
        report: see :class:`ReportData`.
        every: as for ``render_text``.
        room: the width of the terminal, where tables leave out columns; None: plain text, where they leave out none.
    """
    width = max(WIDTH if room is None else room, _NARROWEST)
    rows = reason_rows(report, every)
    yield Text(wording.headline(report), style="bold green" if report.ok else "bold red")
    yield Text(wording.versions(report))
    yield Text(f"verification: {_verification(report, every)}")
    for row in matter(rows):
        yield from _reason(row, width, every)
    graphs, more = node_grids(report.collections, every)
    for section in [*overview(report.collections, every), *graphs]:
        yield from _grid(section, None if every and room is None else width, None if room is None else SPARE)
    if more:
        yield Text(f"\n{more}")
    if graphs:
        yield Text("\n".join(_wrapped(LEGEND, width, "", "    ")))
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


def _grid(grid: Grid, width: int | None, spare: Sequence[str] | None) -> Iterator[Text]:
    """A table below its title; the width and the columns to spare are those of ``to_lines``."""
    yield Text("\n" + "\n".join(_wrapped(grid.title, width or WIDTH, "", "    ")), style="bold")
    grid = replace(grid, rows=tuple(tuple(map(printable, row)) for row in grid.rows), more=printable(grid.more))
    head, *rows = to_lines(grid, width, spare=spare)
    yield Text(head, style="bold")
    yield Text("\n".join(rows))
    if grid.more:
        yield Text(grid.more)
