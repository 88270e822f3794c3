"""``get_default_hybrid_sharders``: sharders that send ids between the hosts."""

import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ModuleSharder, ShardingEnv

from recfx.errors import ConversionError, type_of
from recfx.planner.sharder import sharders

_HOW = "pass ShardingEnv.from_process_group(dist.new_group(backend='gloo'))."


def get_default_hybrid_sharders(host_env: ShardingEnv) -> list[ModuleSharder[nn.Module]]:
    """Sharders for the planner and for ``DistributedModelParallel``.

    ``host_env`` is over a gloo group of all ranks, which sends the ids; pooled rows use the model's group.
    """
    if not isinstance(host_env, ShardingEnv):
        raise ConversionError(
            f"host_env is {type_of(host_env)}, not a ShardingEnv.", reason="host_env_missing", what_to_do=_HOW
        )
    made = sharders(host_env=host_env)
    backend = dist.get_backend(host_env.process_group)
    if backend != "gloo":
        raise ConversionError(
            f"host_env is over {backend}: ids are in host memory, and only gloo can send from there.",
            reason="host_env_not_gloo",
            what_to_do=_HOW,
        )
    return made
