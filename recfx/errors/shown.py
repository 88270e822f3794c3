"""Tables as text, as wide as the terminal or in lines as long as they need be, and as HTML: a page, or what a notebook
shows, without other files and with everything escaped.
"""

import io
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from html import escape as escape_html
from typing import ClassVar

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from recfx.errors import printable
from recfx.errors.grid import Grid

_WIDEST = 10_000
# Everything but the page itself takes the colour of the text around it, so that it fits into a notebook of any colour.
_STYLE = """
.recfx.recfx { font: 14px/1.45 system-ui, sans-serif; overflow-wrap: anywhere;
  & .scroll { overflow: auto; max-height: 85vh; margin: .5em 0 1.5em; overflow-wrap: break-word; }
  & table { border-collapse: collapse; margin: 0; font-size: inherit; }
  & th, & td { border: 1px solid color-mix(in srgb, currentColor 25%, transparent); padding: .2em .6em;
    text-align: left; vertical-align: top; max-width: 36em; }
  & th { white-space: nowrap; }
  & .number { text-align: right; white-space: nowrap; }
  & pre { overflow-x: auto; }
  & .ok { color: color-mix(in srgb, currentColor 45%, #00a03c); }
  & .error { color: color-mix(in srgb, currentColor 45%, #e00000); }
  & .warning { color: color-mix(in srgb, currentColor 45%, #c88200); }
}
"""
_PAGE_STYLE = ":root { color-scheme: light dark; } body { margin: 2em auto; max-width: 96em; padding: 0 1em; }"


def page(title: str, status: str, parts: Iterable[str]) -> str:
    """The whole page: ``title``, its first line, has the class ``status`` (``ok``, ``warning`` or ``error``), and
    ``parts`` are what follows, in HTML.
    """
    head = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}</style></head><body>",
    ]
    inside = fragment([f'<h1 class="{status}">{escape(title)}</h1>', *parts])
    return "\n".join([*head, inside, "</body></html>"]) + "\n"


def fragment(parts: Iterable[str]) -> str:
    """A part of a page, as notebooks show it: parts in HTML, with their style, which is about nothing else."""
    return "\n".join([f'<div class="recfx"><style>{_STYLE}</style>', *parts, "</div>"])


def heading(text: str, status: str = "") -> str:
    """The first line of a fragment, which has no title; ``status`` as for a page."""
    return f"<p><strong{f' class={status}' if status else ''}>{escape(text)}</strong></p>"


def escape(text: str) -> str:
    """The text as it is read in the page, which can be written in any encoding of Unicode."""
    return escape_html(printable(text))


def pre(text: str) -> str:
    """Text of several lines, as it is."""
    return f'<pre tabindex="0">{escape_html(printable(text, keep=chr(10)))}</pre>'


def html_table(grid: Grid) -> list[str]:
    """A grid, without its title; what is wider or higher than the window scrolls by itself, also with the keyboard."""
    below = [f"<p>{escape(grid.more)}</p>"] if grid.more else []
    if not grid.rows:
        return below
    numbers = [" class=number" if column in grid.numbers else "" for column in grid.columns]
    head = (f'<th scope="col"{of}>{escape(column)}</th>' for column, of in zip(grid.columns, numbers, strict=True))
    rows = [
        f"<tr>{''.join(f'<td{of}>{escape(cell)}</td>' for cell, of in zip(row, numbers, strict=True))}</tr>"
        for row in grid.rows
    ]
    box = f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(grid.columns[0])}">'
    table = f"<table><thead><tr>{''.join(head)}</tr></thead><tbody>"
    return ["\n".join([box + table, *rows, "</tbody></table></div>"]), *below]


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
    """An object that :meth:`as_grid` makes a table of: ``str()`` is plain text, and a notebook shows HTML."""

    MOST: ClassVar[int] = sys.maxsize  # how many rows text shows at most

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
        return fragment([heading(grid.title, grid.status), *above, *html_table(grid)])
