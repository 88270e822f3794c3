"""Batches in flight: hashed, but their gradients have not reached the tables yet, so their rows must keep their ids."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from recfx.errors import InputError
from recfx.kernels.hash_index import InFlight


class BatchInFlight:
    """One batch whose gradients may still come.

    It has finished when all its lookups have run their backward, or when nothing is left that could run one: only the
    bags of rows and the autograd graph hold this object.

    Args:
        numbers: the number of the batch, by table; 0 if it is not a training batch.
        evictions: returns how many ids these tables have evicted so far.
    """

    def __init__(self, numbers: dict[str, int], evictions: Callable[[], int]) -> None:
        self.numbers = numbers
        self.rows: dict[str, torch.Tensor] | None = None  # by table, once they are known
        self.is_over = False
        self._evictions = evictions
        self._evictions_when_over: int  # once it is over
        self._watched = 0
        self._waiting: set[int] = set()  # lookups whose backward has not run yet

    def watch(self, output: torch.Tensor) -> None:
        """Keep the batch in flight until the backward of ``output``, which a lookup of it returned, has run."""
        if output.grad_fn is None:
            return
        lookup = self._watched
        self._watched += 1
        self._waiting.add(lookup)
        output.grad_fn.register_prehook(self._before_backward)
        output.grad_fn.register_hook(lambda *gradients: self._after_backward(lookup))

    def end(self) -> None:
        """Record that the batch no longer needs its rows."""
        self.is_over, self.rows = True, None
        self._evictions_when_over = self._evictions()

    def _before_backward(self, *gradients: Any) -> None:
        if self.is_over and self._evictions() != self._evictions_when_over:
            raise InputError(
                f"a second backward through a batch of tables {sorted(self.numbers)}: rows that it used have gone to "
                "other ids since the first one.",
                reason="backward_after_eviction",
                what_to_do="run all backwards of a batch before the next batch's forward.",
            )

    def _after_backward(self, lookup: int) -> None:
        self._waiting.discard(lookup)
        if not self._waiting and not self.is_over:
            self.end()


class BatchesInFlight:
    """All batches of one collection that are in flight."""

    def __init__(self) -> None:
        self._batches: weakref.WeakSet[BatchInFlight] = weakref.WeakSet()

    def add(self, batch: BatchInFlight | None) -> None:
        """From now on, later batches do not take this batch's rows."""
        if batch is not None:
            self._batches.add(batch)

    def of_table(self, table: str) -> InFlight:
        """The rows of one table that must keep their ids."""
        nothing = InFlight.nothing()
        batches = [batch for batch in self._batches if not batch.is_over and table in batch.numbers]
        listed = [batch for batch in batches if batch.rows is not None]
        return InFlight(
            oldest=min((each.numbers[table] for each in batches if each.rows is None), default=nothing.oldest),
            rows=torch.cat([each.rows[table] for each in listed if each.rows is not None]) if listed else nothing.rows,
            oldest_listed=min((each.numbers[table] for each in listed), default=nothing.oldest_listed),
        )
