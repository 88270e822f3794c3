"""Takes over what users attach to the weights of a collection: optimizers in backward and gradient hooks."""

from __future__ import annotations

import weakref
from itertools import chain
from typing import Any

from torch import nn

from recfx.errors import Diagnostic
from recfx.lowering.registry import WeightFacts, facts_of_weights
from recfx.optim.attached import attached_optimizers, attached_to_each
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import attach_unfused, fused_optimizers, hooks_on_step, positions_with_hooks
from recfx.runtime import TableStore


class OptimizerFollower:
    """Keeps the fused optimizers of a :class:`TableStore` in line with what is attached to its weights.

    ``not_fused`` has the optimizers in backward that no kernel can carry out, and why not, by table name.
    """

    def __init__(self, store: TableStore, collection: str, tables: str) -> None:
        self._store, self._collection, self._tables = store, collection, tables
        self._aside: dict[str, tuple[weakref.ref[nn.Parameter], FusedOptimizer]] = {}
        self.not_fused: dict[str, Diagnostic] = {}
        self.take_over()

    def take_over(self) -> None:
        """Take over the optimizers in backward that are attached to the tables; copies and pickles keep theirs."""
        self._set_aside()
        for table, optimizer in self._store.optimizers.items():
            weight = self._store.weight(table)
            if hooks_on_step(weight) or len(attached_optimizers(weight)) > 1:  # it goes on with the fused one's state
                attach_unfused(weight, optimizer)
        optimizers, self.not_fused = fused_optimizers(self._store.bags, self._collection, self._tables)
        self._store.optimizers.update(optimizers)
        for table in self.not_fused:  # such as a second optimizer beside one that was fused
            self._store.optimizers.pop(table, None)
        self._store.own_weights()

    def _set_aside(self) -> None:
        """Set aside optimizers whose parameter was replaced by another one, and bring them back when it returns."""
        for table, (owner, optimizer) in list(self._aside.items()):
            if owner() is self._store.weight(table) or owner() is None:
                del self._aside[table]
            if owner() is self._store.weight(table):
                self._store.optimizers.setdefault(table, optimizer)
        for table in list(self._store.optimizers):
            before = self._store.owner(table)
            if before is not None and before() is not self._store.weight(table):
                self._aside[table] = before, self._store.optimizers.pop(table)

    def look(self) -> tuple[list[Any], list[WeightFacts]]:
        """The optimizers in backward on the tables, with which tables have gradient hooks; and what kernels are chosen
        for. Every forward asks, in some models for thousands of tables.

        The value stays equal as long as nothing is attached or removed, and no table changes. Each collection keeps its
        own last value: copies of its modules share the follower, but have their own graph to make anew.
        """
        bags = self._store.bags
        try:
            weights: list[Any] = [bag._parameters["weight"] for bag in bags._modules.values() if bag is not None]
            attached = attached_to_each(weights)
        except (KeyError, AttributeError):  # a weight is gone, by pruning or set to None: say which, and what to do
            weights = [self._store.weight(table) for table in bags]
            attached = attached_to_each(weights)
        # Not their ids: another one may get the id of one that is gone.
        watched: list[Any] = list(chain.from_iterable(attached))
        if watched or self._store.optimizers or self._aside:
            watched += map(id, weights)
            watched += [-1 - position for position in positions_with_hooks(weights, attached)]
        return watched, facts_of_weights(weights)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_aside": {}}
