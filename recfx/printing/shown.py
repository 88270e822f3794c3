"""What is a table by itself: as text, in a terminal as wide as that is, and in a notebook."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from recfx.errors import printable
from recfx.printing.grid import Grid
from recfx.printing.page import escape, fragment, heading, table
from recfx.printing.text import plain_text, rich_table


class Shown(ABC):
    """An object that :meth:`as_grid` makes a table of: ``str()`` is plain text, and a notebook shows HTML.

    Attributes:
        MOST: how many rows text shows at most.
    """

    MOST: ClassVar[int] = sys.maxsize

    @abstractmethod
    def as_grid(self) -> Grid:
        """The table, with its title."""

    def _parts(self) -> Iterator[RenderableType]:
        grid = self.as_grid()
        yield from map(Text, map(printable, filter(None, (grid.title, *grid.above))))
        if grid.rows:
            yield rich_table(grid, self.MOST)
        if len(grid.rows) > self.MOST:
            yield Text(f"... and {len(grid.rows) - self.MOST:,} more (as_grid().rows has all)")
        if grid.more:
            yield Text(printable(grid.more))

    def __str__(self) -> str:
        return plain_text(self._parts())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._parts()

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        grid = self.as_grid()
        above = [f"<p>{escape(line)}</p>" for line in grid.above]
        return fragment([heading(grid.title, grid.status), *above, *table(grid)])
