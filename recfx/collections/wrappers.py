"""The model that the user passes: what torch and TorchRec put around it, and what is no model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torchrec.distributed.model_parallel import DistributedModelParallel

# What DistributedDataParallel, torch.compile and DistributedModelParallel call the model inside.
_INSIDE = {"module", "_orig_mod", "_dmp_wrapped_module"}


_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, DistributedModelParallel, OptimizedModule)


def users_path(model: nn.Module, path: str) -> str:
    """The name of a module or a table in ``model``, without what wrappers of it, and of modules in it, add to it."""
    parts: list[str] = []
    holder: nn.Module | None = model
    for part in path.split("."):
        if not (isinstance(holder, _WRAPPERS) and part in _INSIDE):
            parts.append(part)
        holder = None if holder is None else holder._modules.get(part)
    return ".".join(parts)


def without_wrappers(path: str) -> str:
    """A fully qualified name, as it is without wrappers."""
    return ".".join(part for part in path.split(".") if part not in _INSIDE)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DistributedModelParallel and torch.compile wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner: Any = model.module
        elif isinstance(model, DistributedModelParallel):
            inner = model._modules.get("_dmp_wrapped_module")
        else:
            inner = model._modules.get("_orig_mod") if isinstance(model, OptimizedModule) else None
        if inner is None:
            return model
        model = inner
