"""Takes over what users attach to the weights of a collection: optimizers in backward and gradient hooks."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from recfx.errors import Diagnostic
from recfx.lowering.registry import WeightFacts
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import attach_unfused, fused_optimizers, hooks_on_step
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
        """See ``TableStore.look``. Each collection keeps its own last value: copies of its modules share the follower,
        but have their own graph to make anew.
        """
        return self._store.look(watched=bool(self._aside))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_aside": {}}
