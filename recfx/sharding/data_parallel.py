"""``DistributedDataParallel`` around sharded collections must not treat their tables and indexes as replicas."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recfx.sharding.collection import sharded_collections


def leave_to_collections(model: nn.Module) -> None:
    """Let a ``DistributedDataParallel`` around ``model``, or any part of it, leave sharded tables alone."""
    ignored: dict[str, set[str]] = {}  # by the path of the module around them
    for path, module in sharded_collections(model).items():
        names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
        parts = path.split(".") if path else []
        for depth in range(len(parts) + 1):
            below = "".join(f"{part}." for part in parts[depth:])
            ignored.setdefault(".".join(parts[:depth]), set()).update(f"{below}{name}" for name in names)
    for path, names_inside in ignored.items():  # once per module: DDP looks at all parameters inside
        parent = model.get_submodule(path)
        names_inside.update(getattr(parent, "_ddp_params_and_buffers_to_ignore", ()))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(parent, sorted(names_inside))
