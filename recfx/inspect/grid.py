"""A small table of text: columns, rows, a title. Text and HTML show the same ones."""

from __future__ import annotations

from dataclasses import dataclass

LISTS_EACH = 'tables="all" lists each'
"""What a title or ``more`` says of what is left out; the page, which leaves nothing out, says something else."""


@dataclass(frozen=True)
class Grid:
    """One table of the report.

    Args:
        title: what it shows, in one line.
        columns: their names; the first names the row.
        rows: cells, one per column. Cells never contain line breaks.
        numbers: names of the columns that are aligned on the right.
        more: a line below, for what was left out.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str] = frozenset()
    more: str = ""

    def without_empty_columns(self) -> Grid:
        """This grid without the columns that have nothing in any row."""
        kept = [place for place in range(len(self.columns)) if any(row[place] for row in self.rows)]
        return Grid(
            self.title,
            tuple(self.columns[place] for place in kept),
            tuple(tuple(row[place] for place in kept) for row in self.rows),
            self.numbers,
            self.more,
        )
