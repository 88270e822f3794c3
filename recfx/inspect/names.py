"""Many names in a few words: numbered ones as a run, the first few of the others, and how many more there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")

_NUMBERED = re.compile(r"(.*?)(?<![0-9])(0|[1-9][0-9]*)", re.DOTALL)
_SHORTEST_RUN = 3


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
    found: list[list[tuple[str, str, int]]] = []  # runs of (name, name without number, number)
    for name in names:
        matched = _NUMBERED.fullmatch(name)
        stem, number = (matched[1], int(matched[2])) if matched is not None else (name, -1)
        last = found[-1][-1] if found else ("", "", -1)
        if matched is not None and last[2] >= 0 and (last[1], last[2] + 1) == (stem, number):
            found[-1].append((name, stem, number))
        else:
            found.append([(name, stem, number)])
    runs = []
    for run in found:
        if len(run) < _SHORTEST_RUN:
            runs += [(name, 1) for name, _, _ in run]
        else:
            runs.append((f"{run[0][0]}..{run[-1][2]}", len(run)))
    return runs


def groups_of(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    """Items grouped by key, in order of first appearance."""
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def plural(count: int, noun: str) -> str:
    """``1 table``, ``1,000 tables``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
