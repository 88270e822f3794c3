"""How often the fused optimizers of a lookup have stepped, in their own ``step``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from recfx.optim.rules.rule import STEP


class StepCounts:
    """The ``step`` of all optimizers of a lookup; these are views of one tensor, so that a single addition does it.

    Args:
        optimizers: of the same rule, or None for tables without one.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._counts = torch.empty(0)
        self._views: list[torch.Tensor | None] = []

    def shared(self) -> torch.Tensor | None:
        """The number of steps of each table, float32 ``[tables]``; None if the rule does not count them."""
        if not self._optimizers[0].rule.counts_steps:
            return None
        self._share()
        return self._counts

    def of(self, held: Sequence[dict[str, Any]]) -> torch.Tensor | None:
        """What ``shared`` returns, if it is already in the states that the optimizers hold; otherwise None."""
        return self._counts if self._are_views([state.get(STEP) for state in held]) else None

    def count(self, trained: list[bool]) -> None:
        """Count a step of the trained tables."""
        counts = self.shared()
        if counts is not None:
            counts.add_(torch.tensor(trained, dtype=torch.float32, device="cpu"))

    def _share(self) -> None:
        """Put views of one tensor in the place of the optimizers' own tensors, if they are not there already."""
        steps = [optimizer.state.get(STEP) for optimizer in self._optimizers]
        if self._are_views(steps):
            return
        none = torch.zeros((), dtype=torch.float32, device="cpu")  # of a table that was never trained
        self._counts = torch.stack([none if step is None else step.detach().to(none) for step in steps])
        self._views = []
        for optimizer, step, view in zip(self._optimizers, steps, self._counts.unbind(), strict=True):
            self._views.append(None if step is None else view)
            if step is not None:
                optimizer.state[STEP] = view

    def _are_views(self, steps: Sequence[torch.Tensor | None]) -> bool:
        return len(steps) == len(self._views) and all(map(operator.is_, steps, self._views))
