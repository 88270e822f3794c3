"""What ``recfx.explain`` returns: the data of the report, and the formats in which it can be shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult

from recfx.inspect.html import render_html
from recfx.inspect.report_data import ReportData
from recfx.inspect.report_json import render_json
from recfx.inspect.text import render, render_text


@dataclass(frozen=True)
class Report(ReportData):
    """What was done to a model, or would be done. ``str()`` is plain text. The base class has the fields.

    A terminal's ``rich.console.Console`` prints it in colours, and as wide as the terminal is.

    Args:
        tables: how tables are shown as text: ``"groups"`` (one line per group of like ones, if there are many) or
            ``"all"`` (one line each). JSON and HTML always have all.
    """

    tables: Literal["groups", "all"] = "groups"

    def __str__(self) -> str:
        return render_text(self, self.tables == "all")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from render(self, self.tables == "all", options.max_width)

    def to_json(self) -> str:
        """The whole report; keys are in the order of the fields of the base class, and symbolic sizes are text."""
        return render_json(self)

    def to_html(self) -> str:
        """A single page that needs no other file."""
        return render_html(self)
