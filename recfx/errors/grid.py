"""Many items in little room: a table of text, and like items as one group."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Grid:
    """One table of the report."""

    title: str  # what it shows, in one line
    columns: tuple[str, ...]  # their names; the first names the row
    rows: tuple[tuple[str, ...], ...]  # cells, one per column; they never contain line breaks
    numbers: frozenset[str] = frozenset()  # names of the columns that are aligned on the right
    more: str = ""  # a line below, such as for what was left out
    above: tuple[str, ...] = ()  # lines between the title and the columns
    status: str = ""  # ``ok``, ``warning`` or ``error``, for the colour of the title

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
