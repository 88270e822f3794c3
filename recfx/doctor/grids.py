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
        statuses = [finding.status for finding in report.findings]
        yield _findings(report), ["error" if status == Status.MISSING else str(status) for status in statuses]
    if report.answers:
        yield _answers(report), ["ok" if answer.ok else "error" for answer in report.answers]
    if report.speeds:
        yield _speeds(report), [""] * len(report.speeds)
    if report.choices:
        yield _choices(report), [""] * len(report.choices)


def _findings(report: Report) -> Grid:
    """What is installed."""
    columns = {
        "": lambda finding: finding.name,
        "status": lambda finding: str(finding.status),
        "found": lambda finding: without_home(finding.found),
        WHAT_TO_DO: lambda finding: without_home(finding.what_to_do),
    }
    return Grid.of("Installation", report.findings, columns)


def _answers(report: Report) -> Grid:
    """What each kernel did, and with which shape it was wrong first."""
    is_real = report.how == "real"
    columns = {
        "": lambda answer: answer.name,
        "on": lambda answer: answer.where,
        "status": lambda answer: "ok" if answer.ok else "WRONG",
        "checked": lambda answer: f"{answer.checked}",
        "wrong": lambda answer: f"{answer.wrong}" if answer.wrong else "",
        "seconds": lambda answer: f"{answer.seconds:.1f}" if is_real else "",
        "smallest that is wrong": lambda answer: answer.smallest,
        "what is wrong": lambda answer: without_home(answer.message),
    }
    checked, wrong = (sum(getattr(answer, what) for answer in report.answers) for what in ("checked", "wrong"))
    title = f"Right: {checked:,} comparisons with references, {wrong:,} wrong"
    return Grid.of(title, report.answers, columns, ("checked", "wrong", "seconds"))


def _speeds(report: Report) -> Grid:
    """Times, and shares of the limit."""
    columns = {
        "": lambda speed: speed.name,
        "ms": lambda speed: f"{speed.milliseconds:.3f}",
        "GB/s": lambda speed: f"{speed.gb_s:,.1f}",
        "of a copy": lambda speed: f"{speed.share_of_copy:.0%}",
        "of the data sheet": lambda speed: "" if speed.share_of_chip is None else f"{speed.share_of_chip:.0%}",
    }
    more = "Medians. Bytes are those that have to be read and written, each row as often as it is asked for: caches can"
    return Grid.of(
        f"Fast: {report.workload}", report.speeds, columns, tuple(columns)[1:], f"{more} make it more than a copy's."
    )


def _choices(report: Report) -> Grid:
    """What was tried."""
    columns = {
        "": lambda choice: choice.name,
        "ms by number": lambda choice: ", ".join(f"{number}: {ms:.3f}" for number, ms in choice.milliseconds.items()),
        "in use": lambda choice: f"{choice.chosen}",
        "kept in": lambda choice: without_home(choice.kept_in),
    }
    return Grid.of("Choices", report.choices, columns, ("in use",))
