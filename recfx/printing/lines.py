"""A grid as lines of text. Where a terminal has no room, columns are left out, the least important ones first."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.cells import cell_len

from recfx.printing.grid import Grid


def to_lines(
    grid: Grid, width: int | None = None, *, spare: Sequence[str] | None = (), between: str = " | ", ruled: bool = True
) -> list[str]:
    """The names of the columns, the rows, and a line about the columns that were left out, if there are any.

    Args:
        grid: what is shown; its title and ``more`` are not.
        width: of the terminal, in characters. A name in the first column that is longer than half of it, or a third if
            few are, has a line of its own above its row, and is never broken. None: lines are as long as they need be.
        spare: names of columns; the first of them is left out first, and columns that are not named last. None: none is
            left out, and lines may be longer than ``width``.
        between: what separates the columns.
        ruled: whether there is a line below the names.
    """
    rows = [grid.columns, *grid.rows]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    kept, alone = list(range(len(widths))), 0
    if width is not None and sum(widths) + len(between) * (len(widths) - 1) > width:
        few_are_long = 4 * sum(cell_len(row[0]) > width // 3 for row in rows) <= len(rows)
        alone = max(width // 3 if few_are_long else width // 2, cell_len(grid.columns[0]))  # names that are longer
        widths[0] = max(length for row in rows if (length := cell_len(row[0])) <= alone)
        if spare is not None:
            kept = _that_fit(grid.columns, widths, width, spare, len(between))
    lines = []
    for row in rows:
        name = row[0]
        if alone and cell_len(name) > alone:
            lines.append(name)
            name = ""
        cells = [
            _padded(cell, widths[place], grid.columns[place] in grid.numbers)
            for place, cell in enumerate((name, *row[1:]))
            if place in kept
        ]
        lines.append(between.join(cells).rstrip())
    if ruled:
        lines.insert(1, between.replace(" ", "-").replace("|", "+").join("-" * widths[place] for place in kept))
    left_out = [column for place, column in enumerate(grid.columns) if place not in kept]
    if left_out and width is not None:
        said = f"columns left out: {', '.join(left_out)}"
        lines += textwrap.wrap(said, width, subsequent_indent="    ", break_long_words=False)
    return lines


def _that_fit(columns: Sequence[str], widths: Sequence[int], width: int, spare: Sequence[str], gap: int) -> list[int]:
    """The places of the columns that fit beside the first; a wide one makes way for less important ones."""
    matters = [place for place, column in enumerate(columns) if place and column not in spare]
    matters += [columns.index(column) for column in reversed(spare) if column in columns[1:]]
    room, kept = width - widths[0], [0]
    for place in matters:
        if widths[place] + gap <= room:
            room -= widths[place] + gap
            kept.append(place)
    return sorted(kept)


def _padded(cell: str, width: int, is_number: bool) -> str:
    space = " " * (width - cell_len(cell))
    return space + cell if is_number else cell + space
