"""Tables as text, in a terminal by rich, and as plain text with lines as long as they need be."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from recfx.errors import printable
from recfx.printing.grid import Grid

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
