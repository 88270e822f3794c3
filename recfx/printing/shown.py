"""What is a table by itself: as text, in a terminal as wide as that is, and in a notebook."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from recfx.errors import printable
from recfx.printing.grid import Grid
from recfx.printing.lines import to_lines
from recfx.printing.page import escape, fragment, heading, table


class Shown(ABC):
    """An object that :meth:`as_grid` makes a table of: ``str()`` is plain text, and a notebook shows HTML.

    Attributes:
        SPARE: the columns that a narrow terminal leaves out, the first of them first.
        MOST: how many rows text shows at most.
    """

    SPARE: ClassVar[tuple[str, ...]] = ()
    MOST: ClassVar[int] = sys.maxsize

    @abstractmethod
    def as_grid(self) -> Grid:
        """The table, with its title."""

    def _lines(self, width: int | None) -> list[str]:
        whole = self.as_grid()
        grid = replace(whole, rows=whole.rows[: self.MOST])
        rows = to_lines(grid, width, spare=self.SPARE, between="  ", ruled=False) if grid.rows else []
        rest = len(whole.rows) - len(grid.rows)
        more = f"... and {rest:,} more (as_grid().rows has all)" if rest else ""
        return list(map(printable, filter(None, [grid.title, *grid.above, *rows, more, grid.more])))

    def __str__(self) -> str:
        return "\n".join(self._lines(None))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(self._lines(options.max_width)))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        grid = self.as_grid()
        above = [f"<p>{escape(line)}</p>" for line in grid.above]
        return fragment([heading(grid.title, grid.status), *above, *table(grid)])
