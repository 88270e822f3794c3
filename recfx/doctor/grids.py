"""The report as titled tables, from which its text and its page are made."""

from __future__ import annotations

from collections.abc import Iterator

from recfx.doctor.finding import Status
from recfx.doctor.report import Report, without_home
from recfx.printing.grid import Grid

WHAT_TO_DO = "what to do"


def grids(report: Report) -> Iterator[tuple[Grid, list[str]]]:
    """Each table with the status of each of its rows, ``ok``, ``warning`` or ``error``."""
    if report.findings:
        yield _findings(report), [_class_of(each.status) for each in report.findings]
    if report.answers:
        yield _answers(report), ["ok" if each.ok else "error" for each in report.answers]
    if report.speeds:
        yield _speeds(report), [""] * len(report.speeds)
    if report.choices:
        yield _choices(report), [""] * len(report.choices)


def _findings(report: Report) -> Grid:
    """What is installed."""
    columns = {
        "": lambda each: each.name,
        "status": lambda each: str(each.status),
        "found": lambda each: without_home(each.found),
        WHAT_TO_DO: lambda each: without_home(each.what_to_do),
    }
    return Grid.of("Installation", report.findings, columns)


def _answers(report: Report) -> Grid:
    """What each kernel did, and with which shape it was wrong first."""
    is_real = report.how == "real"
    columns = {
        "": lambda each: each.name,
        "on": lambda each: each.where,
        "status": lambda each: "ok" if each.ok else "WRONG",
        "checked": lambda each: f"{each.checked}",
        "wrong": lambda each: f"{each.wrong}" if each.wrong else "",
        "seconds": lambda each: f"{each.seconds:.1f}" if is_real else "",
        "smallest that is wrong": lambda each: each.smallest,
        "what is wrong": lambda each: without_home(each.message),
    }
    checked, wrong = (sum(getattr(each, what) for each in report.answers) for what in ("checked", "wrong"))
    title = f"Right: {checked:,} comparisons with references, {wrong:,} wrong"
    return Grid.of(title, report.answers, columns, ("checked", "wrong", "seconds"))


def _speeds(report: Report) -> Grid:
    """Times, and shares of the limit."""
    columns = {
        "": lambda each: each.name,
        "ms": lambda each: f"{each.milliseconds:.3f}",
        "GB/s": lambda each: f"{each.gb_s:,.1f}",
        "of a copy": lambda each: f"{each.share_of_copy:.0%}",
        "of the data sheet": lambda each: "" if each.share_of_chip is None else f"{each.share_of_chip:.0%}",
    }
    more = "Medians. Bytes are those that have to be read and written, each row as often as it is asked for: caches can"
    return Grid.of(
        f"Fast: {report.workload}", report.speeds, columns, tuple(columns)[1:], f"{more} make it more than a copy's."
    )


def _choices(report: Report) -> Grid:
    """What was tried."""
    columns = {
        "": lambda each: each.name,
        "ms by number": lambda each: ", ".join(f"{number}: {ms:.3f}" for number, ms in each.milliseconds.items()),
        "in use": lambda each: f"{each.chosen}",
        "kept in": lambda each: without_home(each.kept_in),
    }
    return Grid.of("Choices", report.choices, columns, ("in use",))


def _class_of(status: Status) -> str:
    return "error" if status == Status.MISSING else str(status)
