"""TorchRec's view of the fused optimizers of a whole model, and what its wrappers of optimizers need."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer


@contextmanager
def with_wrappers(optimizer: KeyedOptimizer, saved: Mapping[str, Any]) -> Iterator[None]:
    """While a state is loaded, give ``optimizer`` the states in it that TorchRec's wrappers keep there for parameters
    of their own (``WarmupOptimizer`` does), but only from their first step on. They stay if the load succeeds.

    ``optimizer`` is one of recfx's, and has the states of all its tables; ``saved`` has the saved states, by name.
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


_ATTRIBUTE = "fused_optimizer"


class ModelFusedOptimizer(CombinedOptimizer):
    """The fused optimizers of all sharded collections of a model, by fully qualified name, under TorchRec's names."""

    def __init__(self, collections: Mapping[str, FusedOptimizerModule]) -> None:
        self._collections = dict(collections)
        super().__init__([(path, module.fused_optimizer) for path, module in self._collections.items()])

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelFusedOptimizer:
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
