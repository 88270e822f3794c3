"""The report as titled tables, from which its text and its page are made."""

from __future__ import annotations

from collections.abc import Iterator

from recfx.doctor.finding import Status
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

    if report.answers:
        yield _answers(report), [str(Status.OK) if each.ok else "error" for each in report.answers]


def _answers(report: Report) -> Grid:
    """What each kernel did, and with which shape it was wrong first."""
    columns = ("", "on", "", "checked", "wrong", "seconds", "smallest that is wrong", "what is wrong")
    rows = tuple(
        (
            each.name,
            each.where,
            "ok" if each.ok else "WRONG",
            f"{each.checked}",
            f"{each.wrong}" if each.wrong else "",
            f"{each.seconds:.1f}",
            each.smallest,
            without_home(each.message),
        )
        for each in report.answers
    )
    checked = sum(each.checked for each in report.answers)
    wrong = sum(each.wrong for each in report.answers)
    title = f"Right: {checked:,} comparisons with references, {wrong:,} wrong"
    kept = [place for place, _ in enumerate(columns) if place < 6 or any(row[place] for row in rows)]
    return Grid(
        title,
        tuple(columns[place] for place in kept),
        tuple(tuple(row[place] for place in kept) for row in rows),
        frozenset({"checked", "wrong", "seconds"}),
    )


def _class_of(status: str) -> str:
    return {"ok": "ok", "warning": "warning"}.get(status, "error")
