"""What checkpoints cannot do: sharded models."""

from __future__ import annotations

from torch import nn
from torchrec.distributed.types import ShardedModule

from recfx.errors import CheckpointError


def refuse_sharded(model: nn.Module) -> None:
    """One process writes and reads these checkpoints; of a sharded model it has a part.

    Raises:
        CheckpointError: ``model_is_sharded``.
    """
    for path, module in model.named_modules():
        if isinstance(module, ShardedModule):
            raise CheckpointError(
                "the collection is sharded: no single process has its tables.",
                reason="model_is_sharded",
                module_path=path,
                what_to_do="use torch.distributed.checkpoint with model.state_dict() and the state_dict() of the fused "
                "optimizer, which any number of ranks can load; or save recfx.unconvert(model, with_mapping=True).",
            )
