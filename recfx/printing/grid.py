"""Many items in little room: a table of text, like items as one group, and many names in a few words."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Item = TypeVar("_Item")

_NUMBERED = re.compile(r"(.*?)(?<![0-9])(0|[1-9][0-9]*)", re.DOTALL)
_SHORTEST_RUN = 3


@dataclass(frozen=True)
class Grid:
    """One table of the report.

    Args:
        title: what it shows, in one line.
        columns: their names; the first names the row.
        rows: cells, one per column. Cells never contain line breaks.
        numbers: names of the columns that are aligned on the right.
        more: a line below, such as for what was left out.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str] = frozenset()
    more: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        items: Iterable[_Item],
        columns: Mapping[str, Callable[[_Item], str]],
        numbers: Iterable[str] = (),
        more: str = "",
    ) -> Grid:
        """A row per item and a column per name, without the columns that have nothing in any row."""
        rows = [tuple(cell(item) for cell in columns.values()) for item in items]
        kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
        names = tuple(columns)
        cells = tuple(tuple(row[place] for place in kept) for row in rows)
        return cls(title, tuple(names[place] for place in kept), cells, frozenset(numbers), more)


def few(names: Sequence[str], most: int) -> str:
    """``table_0..25``, or ``user, item, page and 4 more``.

    Args:
        names: the names, in the order in which they are shown.
        most: how many names, or runs of names, are written out. At least that many of them fit, or all.
    """
    runs = runs_of(names)
    shown, rest = runs[:most], sum(count for _, count in runs[most:])
    return ", ".join(text for text, _ in shown) + (f" and {rest:,} more" if rest else "")


def runs_of(names: Sequence[str]) -> list[tuple[str, int]]:
    """Each run of at least three consecutive numbers as ``table_0..25``, other names as they are, with their counts."""
    runs: list[list[tuple[str, str, int]]] = []  # runs of (name, name without number, number)
    for name in names:
        matched = _NUMBERED.fullmatch(name)
        stem, number = (matched[1], int(matched[2])) if matched is not None else (name, -1)
        last = runs[-1][-1] if runs else ("", "", -1)
        if matched is not None and last[2] >= 0 and (last[1], last[2] + 1) == (stem, number):
            runs[-1].append((name, stem, number))
        else:
            runs.append([(name, stem, number)])
    shown = []
    for run in runs:
        if len(run) < _SHORTEST_RUN:
            shown += [(name, 1) for name, _, _ in run]
        else:
            shown.append((f"{run[0][0]}..{run[-1][2]}", len(run)))
    return shown


def groups_of(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    """Items grouped by key, in order of first appearance."""
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def plural(count: int, noun: str) -> str:
    """``1 table``, ``1,000 tables``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
