"""The ranks that hold the tables of a model."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardedModule

from recfx.collections.converted_collection import ConvertedCollection
from recfx.errors import RecfxError, type_of


def group_of_model(
    model: nn.Module, error: type[RecfxError], *, if_several: str, if_sharded_alone: str
) -> dist.ProcessGroup | None:
    """The process group of a model's collections; None if nothing is sharded.

    Args:
        model: the model, without wrappers.
        error: the error to raise.
        if_several: what users can do if collections are in different groups.
        if_sharded_alone: what they can do if TorchRec alone has sharded something.

    Raises:
        RecfxError: ``several_process_groups``, ``model_is_sharded``, as ``error``.
    """
    group: dist.ProcessGroup | None = None
    for path, module in model.named_modules():
        if isinstance(module, ConvertedCollection) and module.is_sharded:
            if group is not None and group is not module.process_group:
                raise error(
                    "the collection is in a different process group than the previous one.",
                    reason="several_process_groups",
                    module_path=path,
                    what_to_do=if_several,
                )
            group = module.process_group
        elif isinstance(module, ShardedModule):
            raise error(
                f"{type_of(module)} is sharded by TorchRec alone.",
                reason="model_is_sharded",
                module_path=path,
                what_to_do=if_sharded_alone,
            )
    return group
