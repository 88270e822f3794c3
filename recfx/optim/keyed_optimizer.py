"""TorchRec's views of the fused optimizers: of one collection, and of a whole model.

The view of a collection also loads state that was saved when the table had fewer rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from recfx.errors import CheckpointError
from recfx.hashing.row_move import RowMove
from recfx.optim.fused_optimizer import FusedOptimizer


@contextmanager
def with_wrappers(optimizer: KeyedOptimizer, saved: Mapping[str, Any]) -> Iterator[None]:
    """While a state is loaded, give ``optimizer`` the states in it that TorchRec's wrappers keep there for parameters
    of their own (``WarmupOptimizer`` does), but only from their first step on. They stay if the load succeeds.

    Args:
        optimizer: one of recfx's; it has the states of all its tables.
        saved: the saved states, by name.
    """
    state: Any = optimizer.state
    added = {
        parameter: copy.deepcopy(saved[name])
        for name, parameter in optimizer.params.items()
        if name in saved and parameter not in state
    }
    state.update(added)
    try:
        yield
    except BaseException:
        for parameter in added:
            del state[parameter]
        raise


class FusedKeyedOptimizer(KeyedOptimizer):
    """State and settings of the fused optimizers of one collection, under TorchRec's names.

    Args:
        parameters: the parameters, by name in the collection.
        optimizers: table and fused optimizer of each parameter, by name in the collection. The state of a parameter is
            ``<table>.momentum1`` and so on, with one row per row of the table.
        groups: the optimizers' settings.
        moves: the row moves of tables whose weights were loaded from fewer rows, by parameter name.
        starts: the value of each state before a row's first step, by parameter name and name of the state.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        optimizers: Mapping[str, tuple[str, FusedOptimizer]],
        groups: list[dict[str, Any]],
        moves: Mapping[str, RowMove],
        starts: Mapping[str, Mapping[str, float]],
    ) -> None:
        self._moves, self._starts = moves, starts
        self._of_parameters = [(parameters[name], *of_table) for name, of_table in optimizers.items()]
        self._all_states: dict[Any, Any] = {}
        super().__init__(parameters, self.state, groups)

    @property
    def state(self) -> dict[Any, Any]:
        """The state of each parameter, with the tensors that kernels use now: training may have replaced some.

        It is always the same dict, in which TorchRec's ``WarmupOptimizer`` keeps a state of its own.
        """
        for parameter, table, fused in self._of_parameters:
            tensors = fused.named_state()
            self._all_states[parameter] = {f"{table}.{saved_as}": tensor for saved_as, tensor in tensors.items()}
        return self._all_states

    @state.setter
    def state(self, value: Any) -> None:
        self._all_states = value

    def step(self, closure: Any = None) -> None:
        """Does nothing, so that it can be one of several in TorchRec's ``CombinedOptimizer``.

        The tables were updated inside ``backward``; settings such as ``lr`` are read at every step.
        """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the tables' gradients are consumed inside ``backward``."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load as TorchRec does; state with fewer rows moves like the weights that ``load_state_dict`` has just loaded.

        Raises:
            CheckpointError: ``rows_mismatch``: the state has a different number of rows, and no weights with that
                number were loaded since the last training step. Nothing has changed.
            ValueError: TorchRec's own error, for different tables or state.
        """
        saved = dict(state_dict["state"])
        for name, parameter in self.params.items():
            current = self.state.get(parameter, {})  # a warm-up that has not stepped has none
            if name in saved:
                saved[name] = {key: self._fit(name, key, value, current.get(key)) for key, value in saved[name].items()}
        with with_wrappers(self, saved):
            super().load_state_dict({**state_dict, "state": saved})

    def _fit(self, name: str, key: str, saved: Any, current: Any) -> Any:
        if not isinstance(saved, torch.Tensor) or not isinstance(current, torch.Tensor):
            return saved
        if saved.shape == current.shape:
            return saved
        move = self._moves.get(name)
        if move is None or (move.saved_rows, *current.shape[1:]) != tuple(saved.shape):
            raise CheckpointError(
                f"the saved optimizer state is {tuple(saved.shape)}, but the table needs {tuple(current.shape)}.",
                reason="rows_mismatch",
                module_path=name,
                what_to_do="load the model's state from the same checkpoint first, then the optimizer's, then train.",
            )
        return move.apply(saved, torch.full_like(current, self._starts[name][key]))


_ATTRIBUTE = "fused_optimizer"


class ModelFusedOptimizer(CombinedOptimizer):
    """The fused optimizers of all sharded collections of a model, under TorchRec's names.

    Args:
        collections: the sharded collections, by fully qualified name in the model.
    """

    def __init__(self, collections: Mapping[str, FusedOptimizerModule]) -> None:
        self._collections = dict(collections)
        super().__init__([(path, module.fused_optimizer) for path, module in self._collections.items()])

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelFusedOptimizer:
        """The fused optimizers of the copied model."""
        return ModelFusedOptimizer({path: copy.deepcopy(module, memo) for path, module in self._collections.items()})

    def __reduce__(self) -> Any:
        return ModelFusedOptimizer, (self._collections,)


def attach_fused_optimizer(model: nn.Module) -> None:
    """Give ``model`` the attribute that scripts written for ``DistributedModelParallel`` use.

    A model that has an attribute of that name keeps it.
    """
    detach_fused_optimizer(model)
    if not hasattr(model, _ATTRIBUTE):
        collections = {path: part for path, part in model.named_modules() if isinstance(part, FusedOptimizerModule)}
        model.__dict__[_ATTRIBUTE] = ModelFusedOptimizer(collections)


def detach_fused_optimizer(model: nn.Module) -> None:
    """Remove the attribute, because the model now has different collections."""
    if isinstance(model.__dict__.get(_ATTRIBUTE), ModelFusedOptimizer):
        del model.__dict__[_ATTRIBUTE]
