"""``DistributedDataParallel`` around sharded collections must not treat their tables and indexes as replicas."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recfx.collections.sharding.collection import sharded_collections


def leave_to_collections(model: nn.Module) -> None:
    """Let a ``DistributedDataParallel`` around ``model``, or any part of it, leave sharded tables alone."""
    for parent in model.modules():
        ignored = {
            name
            for path, module in sharded_collections(parent).items()
            for name, _ in [*module.named_parameters(path), *module.named_buffers(path)]
        }
        if ignored:
            ignored.update(getattr(parent, "_ddp_params_and_buffers_to_ignore", ()))
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(parent, sorted(ignored))
