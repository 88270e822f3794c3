"""What ``recfx.explain`` returns: the data of the report, and the formats in which it can be shown."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import sympy
from rich.console import Console, ConsoleOptions, RenderResult

from recfx.errors import Diagnostic
from recfx.inspect import wording
from recfx.inspect.html import render_fragment, render_html
from recfx.inspect.report_data import CollectionReport, ReportData
from recfx.inspect.table_report import HashingReport
from recfx.inspect.text import render, render_text

_REASON = {
    "code": "code",
    "module_path": "path",
    "message": "message",
    "what_to_do": "what_to_do",
    "severity": "severity",
}
_DECLINED = {"by": "by", "reason": "code", "message": "message", "node": "node"}
_ROLLBACK = {"module_path": "path", "reason": "code", "message": "message"}
_WHY = ("reason", "message", "what_to_do")  # keys of a collection itself, not of an object in it

# How diagnostics are written in each field of the report that holds them: key -> attribute.
_KEYS = {
    "reasons": _REASON,
    "notes": _REASON,
    "declined": _DECLINED,
    "kernels_passed_over": _DECLINED,
    "rollbacks": _ROLLBACK,
}


def plain(value: Any, field: str = "") -> Any:
    """Convert to dicts, lists and scalars.

    Args:
        value: the report, or a part of it.
        field: the field of the report that holds the value.
    """
    if isinstance(value, Diagnostic):
        return {key: getattr(value, attribute) for key, attribute in _KEYS[field].items()}
    if is_dataclass(value):
        names = [attribute.name for attribute in fields(ReportData if isinstance(value, ReportData) else value)]
        if isinstance(value, CollectionReport):
            names[names.index("why") : names.index("why") + 1] = _WHY
        data = {name: plain(getattr(value, name), name) for name in names}
        return data | {"counters": dict(value.counters)} if isinstance(value, HashingReport) else data
    if isinstance(value, tuple):
        return [plain(item, field) for item in value]
    return str(value) if isinstance(value, sympy.Basic) else value


@dataclass(frozen=True, repr=False)
class Report(ReportData):
    """What was done to a model, or would be done. ``str()`` is plain text. The base class has the fields.

    A terminal's ``rich.console.Console`` prints it in colours, and as wide as the terminal is: where there is no room,
    tables leave out columns. Notebooks show it as HTML.

    Example:
        >>> report = recfx.explain(Model())
        >>> report.ok, [collection.path for collection in report.collections]
        (True, ['ebc'])
        >>> print(report)
        1 collection: 1 convertible. OK
        ...

    Args:
        tables: how tables are shown as text: ``"groups"`` (one line per group of like ones, if there are many) or
            ``"all"`` (one line each). JSON and HTML always have all.
    """

    tables: Literal["groups", "all"] = "groups"

    def __str__(self) -> str:
        return render_text(self, self.tables == "all")

    def __repr__(self) -> str:
        return f"Report({wording.headline(self)})"

    def _repr_html_(self) -> str:
        """What a notebook shows: all but the details of each table."""
        return render_fragment(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from render(self, self.tables == "all", options.max_width)

    def to_json(self) -> str:
        """The whole report; keys are in the order of the fields of the base class, and symbolic sizes are text.

        Example:
            >>> import json
            >>> json.loads(recfx.explain(Model()).to_json())["ok"]
            True
        """
        return json.dumps(plain(self), indent=2)

    def to_html(self, picture: str = "") -> str:
        """A single page that needs no other file.

        Example:
            >>> with open("report.html", "w", encoding="utf-8") as file:
            ...     size = file.write(recfx.explain(Model()).to_html())

        Args:
            picture: the address of a page of ``recfx.draw``, such as ``"model.html"`` if it is in the same folder: the
                names of collections, tables and nodes are links to their places there.
        """
        return render_html(self, picture)
