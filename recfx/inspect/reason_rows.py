"""The reasons of a report, one row per reason code, with everything that it holds for: for text and HTML."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recfx.collections.kinds import table_in
from recfx.errors import Severity, few, plural
from recfx.inspect import wording
from recfx.inspect.report_data import ReportData
from recfx.inspect.sections import FILLING
from recfx.printing.grid import groups_of

_MOST_NAMES = 4
_MOST_COLLECTIONS = 3


@dataclass(frozen=True)
class Finding:
    """What a reason says, in the same words, about one or several modules."""

    paths: tuple[str, ...]
    message: str
    what_to_do: str


@dataclass(frozen=True)
class ReasonRow:
    """One reason code.

    Args:
        severity: how much it matters.
        code: the reason code.
        holds_for: what it is about, in a few words.
        findings: what it says; tables about which it says the same are one finding.
    """

    severity: Severity
    code: str
    holds_for: str
    findings: tuple[Finding, ...]

    @property
    def advice(self) -> str | None:
        """What to do, if that is the same for all findings; otherwise None."""
        advice = {finding.what_to_do for finding in self.findings}
        return advice.pop() if len(advice) == 1 else None


def reason_rows(report: ReportData, every: bool = False) -> list[ReasonRow]:
    """One row per severity and code, the worst first; among equals, tables that fill up come first.

    Args:
        report: the report.
        every: write out all names instead of a few.
    """
    places = {path: wording.place(part) for part in report.collections for path in part.paths if part.file}
    tables = sum(len(part.tables) for part in report.collections)
    most = None if every else _MOST_NAMES
    rows = []
    for group in groups_of(report.reasons, lambda reason: (reason.severity, reason.code)):
        findings = tuple(
            Finding(tuple(reason.path for reason in same), same[0].message, same[0].what_to_do)
            for same in groups_of(group, lambda reason: (reason.message, reason.what_to_do))
        )
        paths = list(dict.fromkeys(reason.path for reason in group))
        rows.append(ReasonRow(group[0].severity, group[0].code, holds_for(paths, most, tables, places), findings))
    return sorted(rows, key=lambda row: (row.severity.rank, row.code not in FILLING))


def holds_for(
    paths: list[str], most: int | None = None, all_tables: int | None = None, places: dict[str, str] | None = None
) -> str:
    """``all 26 tables of sparse_arch.ebc: table_0..25``.

    Args:
        paths: fully qualified names of modules, collections or tables.
        most: how many names are written out; None for all.
        all_tables: number of tables in the model.
        places: ``file:line`` by the path of a collection.
    """
    shown = len(paths) if most is None else most
    if len(paths) == 1:
        place = (places or {}).get(paths[0], "")
        return wording.name_of(paths[0]) + (f" ({place})" if place else "")
    split = [table_in(path) for path in paths]
    if not all(table for _, table in split):
        return f"{len(paths):,} modules: {few([wording.name_of(path) for path in paths], shown)}"
    by_collection = groups_of(split, lambda named: named[0])
    count = ("all " if len(paths) == all_tables else "") + plural(len(paths), "table")
    if len(by_collection) == 1:
        owner = f" of {split[0][0]}" if split[0][0] else ""
        return f"{count}{owner}: {few([table for _, table in split], shown)}"
    most_collections = len(by_collection) if most is None else _MOST_COLLECTIONS
    named = [
        f"{wording.name_of(group[0][0])}: {few([table for _, table in group], shown)}"
        for group in by_collection[:most_collections]
    ]
    if len(by_collection) > most_collections:
        named.append(f"and {plural(len(by_collection) - most_collections, 'more collection')}")
    return f"{count} of {plural(len(by_collection), 'collection')}: {'; '.join(named)}"


def matter(rows: Iterable[ReasonRow]) -> list[ReasonRow]:
    """The refusals and warnings."""
    return [row for row in rows if row.severity != Severity.INFO]


def notes(rows: Iterable[ReasonRow]) -> list[ReasonRow]:
    """What is only worth knowing."""
    return [row for row in rows if row.severity == Severity.INFO]
