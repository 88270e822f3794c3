"""The numbers of a step for all tables of a lookup, computed once for each setting that tables share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from recfx.optim.rules.rule import Rule


class NumbersOfTables:
    """``StepNumbers`` of some tables, as one list; computed anew when a setting has changed.

    Args:
        rule: of all tables.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._names = tuple(setting.name for setting in rule.settings)
        self._keys: list[Any] | None = None  # of settings that cannot change without being replaced
        self._numbers: list[float] = []

    def of(self, groups: Sequence[Mapping[str, Any]], steps: Sequence[float] | None) -> list[float]:
        """One table after the other. The caller must not change the list.

        Args:
            groups: the settings of each table.
            steps: the number of steps of each table, including this one; None: the rule does not read it.
        """
        names = self._names
        keys: list[Any] = [tuple(map(group.get, names)) for group in groups]
        if steps is None and keys == self._keys:
            return self._numbers
        settings: list[Any] | None = keys
        by_step = steps is not None
        keys = list(zip(keys, steps, strict=True)) if steps is not None else keys
        try:
            group_of = dict(zip(keys, groups, strict=True))
        except TypeError:  # betas are a list, if they come from a file
            keys, settings = [_hashable(key) for key in keys], None
            group_of = dict(zip(keys, groups, strict=True))
        found = {
            key: [float(number) for number in self._rule.step_numbers(key[1] if by_step else 0.0, group)]
            for key, group in group_of.items()
        }
        self._numbers = list(chain.from_iterable(map(found.__getitem__, keys)))
        self._keys = settings if not by_step and all(map(_is_constant, found)) else None
        return self._numbers


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _is_constant(value: Any) -> bool:
    """Whether it can only be replaced; a tensor may get another value."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (int, float))
