"""The state of tables that a rank has as a whole: how they are loaded, and their optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torchrec.optim.keyed import KeyedOptimizer

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.fit_state import fit_state, fit_weights
from recfx.collections.kinds import kind_of
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.keyed_optimizer import FusedKeyedOptimizer
from recfx.runtime.hooks import load_hooks, without_load_hooks


class WholeTables(ConvertedCollection):
    """The tables of an unsharded collection; base of ``UnshardedCollection``."""

    is_sharded = False

    @property
    def process_group(self) -> None:
        """None, because every rank has the tables as a whole."""
        return None

    @abstractmethod
    def fused_optimizers(self) -> dict[str, FusedOptimizer]:
        """The optimizer of every table that is updated in the lookup's backward, by table name."""

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """State and settings of the fused optimizers, under TorchRec's names (``<table>.momentum1``)."""
        parameters, state, groups, starts = {}, {}, [], {}
        kind = kind_of(self)
        for name, optimizer in self.fused_optimizers().items():
            weight, key = self._store.weight(name), kind.weight_name("", name)
            optimizer.prepare(weight)
            parameters[key] = weight
            starts[key] = {f"{name}.{saved_as}": value for saved_as, value in optimizer.starts().items()}
            state[weight] = {f"{name}.{momentum}": tensor for momentum, tensor in optimizer.named_state().items()}
            optimizer.group["params"] = [weight]  # pickles lack it, and emptied copies have others
            groups.append(optimizer.group)
        moves = {kind.weight_name("", table): move for table, move in self._row_moves.items()}
        return FusedKeyedOptimizer(parameters, state, groups, moves, starts)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state, which may have fewer rows: ids then move to their bucket's rows, and their weights with them.

        Raises:
            CheckpointError: an index is damaged or belongs to something else. Nothing of this collection has changed.
        """
        for hook in load_hooks(self).values():  # before the keys are read, because they may rename them
            hook(state_dict, prefix, *args)
        fitted, moves = fit_state(self, state_dict, prefix)
        fitted.update(fit_weights(self, state_dict, prefix, moves))
        state_dict.update(fitted)
        for table in self.hash_indexes:
            self.index(table).expect_load()
        with without_load_hooks(self):
            super()._load_from_state_dict(state_dict, prefix, *args)
        self.note_row_moves(moves)

    def check_state(self, saved: Mapping[str, Any], prefix: str) -> None:
        """Check whether the collection could load its part of a state; see the base class for arguments and errors."""
        fit_state(self, saved, prefix)
