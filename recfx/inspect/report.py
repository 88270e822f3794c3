"""What ``recfx.explain`` returns: the data of the report, and the formats in which it can be shown."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.inspect.html import render_html
from recfx.inspect.report_data import ReportData
from recfx.inspect.report_json import render_json
from recfx.inspect.text import render_text


@dataclass(frozen=True)
class Report(ReportData):
    """What was done to a model, or would be done. ``str()`` is for a terminal. The base class has the fields."""

    def __str__(self) -> str:
        return render_text(self)

    def to_json(self) -> str:
        """The whole report; keys are in the order of the fields, and symbolic sizes are text."""
        return render_json(self)

    def to_html(self) -> str:
        """A single page that needs no other file."""
        return render_html(self)
