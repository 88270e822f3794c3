"""TorchRec's view of the fused optimizers of a whole model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer

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
