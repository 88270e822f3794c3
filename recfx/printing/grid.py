"""Many items in little room: a table of text, and like items as one group."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Grid:
    """One table of the report.

    Args:
        title: what it shows, in one line.
        columns: their names; the first names the row.
        rows: cells, one per column. Cells never contain line breaks.
        numbers: names of the columns that are aligned on the right.
        more: a line below, such as for what was left out.
        above: lines between the title and the columns.
        status: ``ok``, ``warning`` or ``error``, for the colour of the title.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str] = frozenset()
    more: str = ""
    above: tuple[str, ...] = ()
    status: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        items: Iterable[_Item],
        columns: Mapping[str, Callable[[_Item], str]],
        numbers: Iterable[str] = (),
        more: str = "",
        above: tuple[str, ...] = (),
    ) -> Grid:
        """A row per item and a column per name, without the columns that have nothing in any row."""
        rows = [tuple(cell(item) for cell in columns.values()) for item in items]
        kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
        names = tuple(columns)
        cells = tuple(tuple(row[place] for place in kept) for row in rows)
        return cls(title, tuple(names[place] for place in kept), cells, frozenset(numbers), more, above)


def size(count: float) -> str:
    """So many bytes in the unit that fits them: ``3.1 KiB``."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def groups_of(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    """Items grouped by key, in order of first appearance."""
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
