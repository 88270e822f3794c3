"""What ``recfx.explain`` returns: the report, and how it is shown as text, HTML and JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from recfx.errors import Diagnostic, Severity, printable
from recfx.inspect.report_data import CollectionReport, Verification
from recfx.inspect.sections import ReasonRow, headline, holds_for, reason_grid, reason_rows, sections
from recfx.planner.pricing.cost_text import plain
from recfx.printing.grid import groups_of
from recfx.printing.page import escape, fragment, heading, page, pre, table
from recfx.printing.shown import plain_text, rich_table

REPORT_VERSION = "3"

_WIDTH, _MOST_ROWS, _MOST_MESSAGES = 120, 20, 2
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
_FOLDED = ("Shards", "Nodes")


@dataclass(frozen=True, repr=False)
class Report:
    """What was done to a model, or would be done. ``str()`` is plain text.

    A terminal's ``rich.console.Console`` prints it in colours, and as wide as the terminal is. Notebooks show it as
    HTML. Text shows the first of many rows, and HTML and JSON show all.

    Example:
        >>> report = recfx.explain(Model())
        >>> report.ok, [collection.path for collection in report.collections]
        (True, ['ebc'])
        >>> print(report)
        1 collection: 1 convertible. OK
        ...

    Args:
        version: the version of this schema; it changes when a field changes its meaning or is removed.
        recfx_version: the version that made the report.
        torch_version: the version that it ran under.
        torchrec_version: the version that it ran under.
        ok: False if any reason is an error: a collection is refused, the model has no collection, or verification
            failed.
        collections: every collection, converted or not, in the order of the model.
        reasons: everything worth knowing, errors first.
        verification: what ``convert`` compared.
    """

    version: str
    recfx_version: str
    torch_version: str
    torchrec_version: str
    ok: bool
    collections: tuple[CollectionReport, ...]
    reasons: tuple[Diagnostic, ...]
    verification: Verification

    def __str__(self) -> str:
        return plain_text(self._text(_WIDTH))

    def __repr__(self) -> str:
        return f"Report({self._headline})"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._text(options.max_width)

    def to_json(self) -> str:
        """The whole report; keys are the names of fields, and symbolic sizes are text.

        Example:
            >>> import json
            >>> json.loads(recfx.explain(Model()).to_json())["ok"]
            True
        """
        return json.dumps(plain(self), indent=2)

    def to_html(self) -> str:
        """A single page that needs no other file.

        Example:
            >>> with open("report.html", "w", encoding="utf-8") as file:
            ...     size = file.write(recfx.explain(Model()).to_html())
        """
        about = f"<p>{escape(self._versions)}, report version {escape(self.version)}</p>"
        return page(self._headline, "ok" if self.ok else "error", [about, *self._parts()])

    def _repr_html_(self) -> str:
        """What a notebook shows: all but what is folded up in the page."""
        title = heading(self._headline, "ok" if self.ok else "error")
        return fragment([title, *self._parts(folded=False)])

    @property
    def _headline(self) -> str:
        return headline(self.collections, self.reasons, self.ok)

    @property
    def _versions(self) -> str:
        return f"recfx {self.recfx_version}, torch {self.torch_version}, torchrec {self.torchrec_version}"

    def _text(self, width: int) -> Iterator[RenderableType]:
        """What matters first, and of many rows the first; prose is wrapped at ``width``."""
        yield Text(self._headline, style="bold green" if self.ok else "bold red")
        yield Text(self._versions)
        verification = self.verification.text.removeprefix("verification: ")
        yield Text(f"verification: {verification if self.verification.ok is False else verification.splitlines()[0]}")
        codes = groups_of(reason_rows(self.reasons), lambda row: (row.reason.severity, row.reason.code))
        for rows in codes:
            if rows[0].reason.severity != Severity.INFO:
                yield from _reason(rows, width)
        for grid in sections(self.collections):
            yield Text(f"\n{grid.title}", style="bold")
            yield rich_table(grid, _MOST_ROWS)
            if len(grid.rows) > _MOST_ROWS:
                yield Text(f"... and {len(grid.rows) - _MOST_ROWS:,} more (to_html() has all)")
            if grid.more:
                yield Text(grid.more)
        for rows in codes:
            if rows[0].reason.severity == Severity.INFO:
                yield from _reason(rows, width)

    def _parts(self, folded: bool = True) -> Iterator[str]:
        """The reasons and the tables in HTML; ``folded``: with those that are folded up."""
        rows = reason_rows(self.reasons)
        matter = [row for row in rows if row.reason.severity != Severity.INFO]
        notes = [row for row in rows if row.reason.severity == Severity.INFO]
        for title, some in (("Refusals and warnings", matter), ("Notes", notes)):
            if some:
                yield f"<h2>{title}</h2>"
                yield from table(reason_grid(some), [row.reason.severity for row in some])
        yield f"<h2>Verification</h2>{pre(self.verification.text)}"
        for grid in sections(self.collections):
            if not grid.title.startswith(_FOLDED):
                yield from (f"<h2>{escape(grid.title)}</h2>", *table(grid))
            elif folded:
                yield f"<details><summary>{escape(grid.title)}</summary>{''.join(table(grid))}</details>"


def _reason(rows: list[ReasonRow], width: int) -> Iterator[Text]:
    """One line that says what it is and for what it holds, then what it means."""
    first = rows[0].reason
    code = f"{first.severity}: {first.code}"
    head = Text(f"\n{code}: {holds_for([path for row in rows for path in row.paths])}")
    head.highlight_words([code], style=_STYLES[first.severity])
    yield head
    for row in rows[:_MOST_MESSAGES]:
        yield _prose(f"{holds_for(row.paths)}: " * (len(rows) > 1) + row.reason.message, width)
        if row.reason.what_to_do:
            yield _prose(f"What to do: {row.reason.what_to_do}", width)
    if len(rows) > _MOST_MESSAGES:
        yield _prose(f"... and {len(rows) - _MOST_MESSAGES:,} more (to_html() has all)", width)


def _prose(text: str, width: int) -> Text:
    return Text(textwrap.fill(printable(text), width, initial_indent="    ", subsequent_indent="    "))
