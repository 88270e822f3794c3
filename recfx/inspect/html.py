"""The report as one HTML page: complete, without other files, and with everything from the model escaped.

What matters comes first; where parts are, nodes and what was declined are folded up below. A small script filters and
sorts the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from recfx.errors import Severity
from recfx.inspect.report_data import ReportData
from recfx.inspect.sections import declined, headline, reason_grid, reason_rows, sections, versions
from recfx.printing.grid import Grid
from recfx.printing.page import escape, fragment, heading, page, pre, table

_FOLDED = ("Shards", "Nodes")
_LINKED = ("Collections", "Tables", "Nodes")


def render_html(report: ReportData, picture: str = "") -> str:
    """The whole page; ``picture`` is the address of a page of ``recfx.draw`` with the same names, for links."""
    about = f"<p>{escape(versions(report))}, report version {escape(report.version)}</p>"
    grids = _sections(report, picture, sections(report))
    more = declined(report)
    folded = [_folded(f"Declined: {len(more.rows):,}", table(more))] if more.rows else []
    status = "ok" if report.ok else "error"
    return page(headline(report), status, [about, *_reasons(report), *grids, *folded], has_filter=True)


def render_fragment(report: ReportData) -> str:
    """What a notebook shows: all but what is folded up in the page."""
    grids = [grid for grid in sections(report) if not grid.title.startswith(_FOLDED)]
    title = heading(headline(report), "ok" if report.ok else "error")
    return fragment([title, *_reasons(report), *_sections(report, "", grids)])


def _reasons(report: ReportData) -> Iterator[str]:
    rows = reason_rows(report.reasons)
    matter = [row for row in rows if row.reason.severity != Severity.INFO]
    notes = [row for row in rows if row.reason.severity == Severity.INFO]
    for title, some in (("Refusals and warnings", matter), ("Notes", notes)):
        if some:
            yield f"<h2>{title}</h2>"
            yield from table(reason_grid(some), classes=[row.reason.severity for row in some])
    yield f"<h2>Verification</h2>{pre(report.verification.text)}"


def _sections(report: ReportData, picture: str, grids: Iterable[Grid]) -> Iterator[str]:
    for grid in grids:
        names = [row[0] for row in grid.rows] if grid.title.startswith(_LINKED) else []
        if grid.title == "Collections":
            names = [collection.path for collection in report.collections]
        shown = table(grid, names=names, linked=picture)
        if grid.title.startswith(_FOLDED):
            yield _folded(grid.title, shown)
        else:
            yield from (f"<h2>{escape(grid.title)}</h2>", *shown)


def _folded(title: str, lines: list[str]) -> str:
    return f"<details><summary>{escape(title)}</summary>{''.join(lines)}</details>"
