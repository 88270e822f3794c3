"""Short words for the text and the HTML page: sizes, places, shares, symbolic expressions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import sympy

from recfx.collections.kinds import table_in
from recfx.errors import below_current, few, printable
from recfx.inspect.report_data import CollectionReport, ReportData
from recfx.inspect.table_report import HashingReport, TableReport

_MOST_TERMS = 4
_STATUS_ORDER = ("converted", "convertible", "kept", "refused")


def headline(report: ReportData) -> str:
    """One line: ``2 collections: 1 converted, 1 refused. NOT OK``, and what training has raised."""
    counts = Counter(collection.status for collection in report.collections)
    total = len(report.collections)
    parts = ", ".join(f"{counts[status]} {status}" for status in _STATUS_ORDER if counts[status])
    counted = f"{total} {'collection' if total == 1 else 'collections'}" if total else "no collections"
    then = ""
    if full := [repr(table_in(reason.path)[1]) for reason in report.reasons if reason.code == "table_full"]:
        which = f"table {full[0]} has" if len(full) == 1 else f"tables {few(full, 3)} have"
        then = f": {which} stopped training, for want of rows"
    return f"{counted}{': ' if parts else ''}{parts}. {'OK' if report.ok else 'NOT OK'}{then}"


def versions(report: ReportData) -> str:
    """The versions that the report was made under."""
    return f"recfx {report.recfx_version}, torch {report.torch_version}, torchrec {report.torchrec_version}"


def name_of(path: str) -> str:
    """A fully qualified name, or a word for the root, whose name is empty."""
    return printable(path) or "(root)"


def place(collection: CollectionReport) -> str:
    """``file:line``, without well-known folders."""
    return place_of(collection.file, collection.line) if collection.file else ""


def place_of(name: str, line: int) -> str:
    """``file:line``, without well-known folders."""
    file = Path(name)
    if "site-packages" in file.parts:
        file = Path(*file.parts[file.parts.index("site-packages") + 1 :])
    return f"{below_current(file)}:{line}"


def count(number: int) -> str:
    """``99,999``, then ``100k``, ``1.23M``: at most seven characters."""
    if number < 100_000:
        return f"{number:,}"
    amount, unit = number / 1000, "k"
    for larger in ("M", "G", "T"):
        if amount < 999.5:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f}{unit}" if amount >= 99.95 else f"{amount:.3g}{unit}"


def share(part: float) -> str:
    """``12.3%``."""
    return f"{100 * part:.1f}%"


def hashing(table: TableReport) -> str:
    """How ids become rows, in one line, with what its index has counted."""
    report, index = table.hashing, table.index
    if report is None or report.mode != "index":
        return "" if report is None else report.mode
    if index is None or index.occupancy is None or index.worst_bucket_occupancy is None:
        return f"index{_dense(report)}, {'not allocated' if table.is_here else 'on other ranks'}"
    worst = f", worst bucket {share(index.worst_bucket_occupancy)}" if (index.buckets or 1) > 1 else ""
    return f"index{_dense(index)}: {index.ids_held:,} ids, {share(index.occupancy)}{worst}{_rules(index)}"


def rules(report: HashingReport | None) -> str:
    """How ids become rows, without what an index has counted: the same for all tables with these settings."""
    if report is None or report.mode != "index":
        return "" if report is None else report.mode
    return f"index{_dense(report)}{_rules(report)}"


def ids_held(tables: Sequence[TableReport]) -> str:
    """How many ids the indexes of like tables hold, and how full these are: ``17,800, 68-70%``."""
    reports = [table.hashing for table in tables if table.hashing is not None and table.hashing.mode == "index"]
    shares = sorted(report.occupancy for report in reports if report.occupancy is not None)
    if not reports:
        return ""
    if not shares:
        return "not allocated" if any(table.is_here for table in tables) else "on other ranks"
    ids = count(sum(report.ids_held or 0 for report in reports))
    least, most = f"{100 * shares[0]:.0f}", f"{100 * shares[-1]:.0f}"
    return f"{ids}, {share(shares[0])}" if len(shares) == 1 or least == most else f"{ids}, {least}-{most}%"


def between(numbers: Iterable[int]) -> str:
    """``1,000``, or ``100-1,099``."""
    numbers = sorted(numbers)
    return f"{numbers[0]:,}" if numbers[0] == numbers[-1] else f"{numbers[0]:,}-{numbers[-1]:,}"


def expression(value: sympy.Expr) -> str:
    """A symbolic size; a sum over the lengths of many features is shortened: ``8*B*(L_f0 + 25 more)``."""
    lengths = sorted((symbol for symbol in value.free_symbols if symbol.name.startswith("L_")), key=str)
    if len(lengths) <= _MOST_TERMS:
        return str(value)
    first = lengths[0]
    shown = str(value.xreplace(dict.fromkeys(lengths[1:], sympy.Integer(0))))
    return re.sub(rf"(?<!\w){re.escape(first.name)}(?!\w)", lambda _: f"({first} + {len(lengths) - 1:,} more)", shown)


def shape(sizes: tuple[sympy.Expr, ...]) -> str:
    """``[B, 16]``."""
    return f"[{', '.join(expression(value) for value in sizes)}]"


def listed(names: Sequence[object], most: int = 3) -> str:
    """The first few of many names, and how many more."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more:,} more" if more > 0 else "")


def _dense(report: HashingReport) -> str:
    return f", ids below {report.dense_rows:,} dense" if report.dense_rows else ""


def _rules(report: HashingReport) -> str:
    """``, evict lru, admit after 3, unseen share``: what differs from the defaults."""
    full = "" if report.on_full == "error" else f", {report.on_full} {report.evict}".rstrip()
    expires = f" after {report.ttl_batches:,} batches" if report.ttl_batches else ""
    admits = f", admit after {report.admit_after}" if (report.admit_after or 1) > 1 else ""
    unseen = "" if report.unseen == "zeros" else f", unseen {report.unseen}"
    return full + expires + admits + unseen
