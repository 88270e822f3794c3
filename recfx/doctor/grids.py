"""The report as titled tables, from which its text and its page are made."""

from __future__ import annotations

from collections.abc import Iterator

from recfx.doctor.report import Report, without_home
from recfx.printing.grid import Grid

WHAT_TO_DO = "what to do"


def grids(report: Report) -> Iterator[tuple[Grid, list[str]]]:
    """Each table with the status of each of its rows, ``ok``, ``warning`` or ``error``."""
    columns = ("", "status", "found", WHAT_TO_DO)
    rows = tuple(
        (each.name, str(each.status), without_home(each.found), without_home(each.what_to_do))
        for each in report.findings
    )
    yield Grid("Installation", columns, rows), [_class_of(str(each.status)) for each in report.findings]


def _class_of(status: str) -> str:
    return {"ok": "ok", "warning": "warning"}.get(status, "error")
