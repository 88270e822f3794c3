"""The numbers of a step for all tables of a lookup: how often they have stepped, and what their settings say."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from recfx.optim.rules.rule import STEP, Rule


class StepCounts:
    """The ``step`` of all optimizers of a lookup; these are views of one tensor, so that a single addition does it."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._counts = torch.empty(0)
        self._views: list[torch.Tensor | None] = []

    def shared(self) -> torch.Tensor | None:
        """The number of steps of each table, float32 ``[tables]``; None if the rule does not count them.

        Views of it are put in the place of the optimizers' own tensors, if they are not there already.
        """
        if not self._optimizers[0].rule.counts_steps:
            return None
        steps = [optimizer.state.get(STEP) for optimizer in self._optimizers]
        if self._are_views(steps):
            return self._counts
        none = torch.zeros((), dtype=torch.float32, device="cpu")  # of a table that was never trained
        self._counts = torch.stack([none if step is None else step.detach().to(none) for step in steps])
        self._views = []
        for optimizer, step, view in zip(self._optimizers, steps, self._counts.unbind(), strict=True):
            self._views.append(None if step is None else view)
            if step is not None:
                optimizer.state[STEP] = view
        return self._counts

    def of(self, states: Sequence[dict[str, Any]]) -> torch.Tensor | None:
        """What ``shared`` returns, if it is already in the states that the optimizers hold; otherwise None."""
        return self._counts if self._are_views([state.get(STEP) for state in states]) else None

    def count(self, trained: list[bool]) -> None:
        counts = self.shared()
        if counts is not None:
            counts.add_(torch.tensor(trained, dtype=torch.float32, device="cpu"))

    def _are_views(self, steps: Sequence[torch.Tensor | None]) -> bool:
        return len(steps) == len(self._views) and all(map(operator.is_, steps, self._views))


class NumbersOfTables:
    """``StepNumbers`` of some tables of one rule, as one list; computed anew when a setting has changed."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._names = tuple(setting.name for setting in rule.settings)
        self._keys: list[Any] | None = None  # of settings that cannot change without being replaced
        self._numbers: list[float] = []

    def of(self, groups: Sequence[Mapping[str, Any]], steps: Sequence[float] | None) -> list[float]:
        """One table after the other, from the settings of each. The caller must not change the list.

        ``steps`` are the numbers of steps, including this one; None: the rule does not read them.
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
        numbers_of = {
            key: [float(number) for number in self._rule.step_numbers(key[1] if by_step else 0.0, group)]
            for key, group in group_of.items()
        }
        self._numbers = list(chain.from_iterable(map(numbers_of.__getitem__, keys)))
        self._keys = settings if not by_step and all(map(_is_constant, numbers_of)) else None
        return self._numbers


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _is_constant(value: Any) -> bool:
    """Whether it can only be replaced; a tensor may get another value."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (int, float))
