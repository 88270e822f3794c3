"""The report as text for a terminal or a log, and as one page to attach to a bug report."""

from __future__ import annotations

from collections.abc import Iterator

from recfx.doctor.grids import WHAT_TO_DO, grids
from recfx.doctor.report import DOCTOR_VERSION, Report, without_home
from recfx.errors import printable
from recfx.printing.grid import Grid
from recfx.printing.page import escape, page, pre, table
from recfx.versions import __version__

HOW = {
    "real": "",
    "simulated": "SIMULATED: CANN is a stand-in here and nothing was computed by an NPU. No times.",
    "interpreted": "Kernels ran in Triton's interpreter. No times.",
}


def to_text(report: Report) -> str:
    """Plain text without colours."""
    lines = [report.headline, *filter(None, [HOW[report.how], report.stopped])]
    for grid, _ in grids(report):
        lines += ["", grid.title, *_rows(grid), *([grid.more] if grid.more else [])]
    return "\n".join(map(printable, lines))


def _rows(grid: Grid) -> Iterator[str]:
    """Aligned columns, and what to do on a line of its own."""
    is_apart = grid.columns[-1] == WHAT_TO_DO
    shown = [row[:-1] if is_apart else row for row in (grid.columns, *grid.rows)]
    widths = [max(len(row[place]) for row in shown) for place in range(len(shown[0]))]
    for row, whole in zip(shown, (grid.columns, *grid.rows), strict=True):
        cells = [
            cell.rjust(width) if column in grid.numbers else cell.ljust(width)
            for column, cell, width in zip(grid.columns, row, widths, strict=False)
        ]
        yield "  ".join(cells).rstrip()
        if is_apart and whole[-1] and whole is not grid.columns:
            yield f"    {WHAT_TO_DO}: {whole[-1]}"


def to_html(report: Report) -> str:
    """One page without other files or scripts."""
    how = f"<p><b>{escape(HOW[report.how])}</b></p>" if HOW[report.how] else ""
    stopped = f'<p class="error">{escape(report.stopped)}</p>' if report.stopped else ""
    parts = [f"<p>recfx {escape(__version__)}, report version {DOCTOR_VERSION}</p>{how}{stopped}"]
    for grid, classes in grids(report):
        parts += [f"<h2>{escape(grid.title)}</h2>", *table(grid, classes)]
    for answer in (answer for answer in report.answers if answer.traceback):
        where = f"<summary>where {escape(answer.name)} failed</summary>"
        parts.append(f"<details>{where}{pre(without_home(answer.traceback))}</details>")
    return page(report.headline, "ok" if report.ok and report.complete else "error", parts)
