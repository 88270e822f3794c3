"""Tables as text: in a terminal as wide as that is, as plain text with lines as long as they need be, in a notebook."""

from __future__ import annotations

import io
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from recfx.errors import printable
from recfx.printing.grid import Grid
from recfx.printing.page import escape, fragment, heading, table

_WIDEST = 10_000


def rich_table(grid: Grid, most: int | None = None) -> Table:
    """The first rows of a grid, without its title."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in grid.columns:
        justify: JustifyMethod = "right" if column in grid.numbers else "left"
        table.add_column(Text(printable(column)), justify=justify, overflow="fold")
    for row in grid.rows[:most]:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def plain_text(parts: Iterable[RenderableType]) -> str:
    """The parts without colours, the same in every pipe and log."""
    output = io.StringIO()
    console = Console(file=output, width=_WIDEST, color_system=None, force_terminal=False, legacy_windows=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


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
