"""What ``recfx.explain`` returns: the data of the report, and the formats in which it can be shown."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult

from recfx.inspect.html import render_fragment, render_html
from recfx.inspect.report_data import ReportData
from recfx.inspect.sections import headline
from recfx.inspect.text import render
from recfx.planner.pricing.cost_text import plain
from recfx.printing.text import plain_text


@dataclass(frozen=True, repr=False)
class Report(ReportData):
    """What was done to a model, or would be done. ``str()`` is plain text. The base class has the fields.

    A terminal's ``rich.console.Console`` prints it in colours, and as wide as the terminal is. Notebooks show it as
    HTML. Text shows the first of many rows, and HTML and JSON show all.

    Example:
        >>> report = recfx.explain(Model())
        >>> report.ok, [collection.path for collection in report.collections]
        (True, ['ebc'])
        >>> print(report)
        1 collection: 1 convertible. OK
        ...
    """

    def __str__(self) -> str:
        return plain_text(render(self))

    def __repr__(self) -> str:
        return f"Report({headline(self)})"

    def _repr_html_(self) -> str:
        """What a notebook shows: all but the details of each table."""
        return render_fragment(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from render(self, options.max_width)

    def to_json(self) -> str:
        """The whole report; keys are the names of fields, and symbolic sizes are text.

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
