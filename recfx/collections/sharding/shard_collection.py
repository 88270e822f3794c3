"""Shards a converted collection: each rank cuts its shards out of the tables that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import SHARDED, ShardedCollection
from recfx.collections.sharding.local_tables import make_local_tables
from recfx.collections.sharding.plan import read_plan
from recfx.runtime.dist_groups import DistGroups


def shard_collection(
    module: UnshardedCollection,
    plan: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None = None,
    *,
    fused_params: Mapping[str, Any] | None = None,
    host_group: torch.distributed.ProcessGroup | None = None,
    dense_as_torchrec: bool = False,
    path: str = "",
) -> ShardedCollection:
    """Shard a converted collection; every rank calls it with the same plan.

    Weights, ids and the state of fused optimizers stay: each rank keeps its shards of what its own ``module`` holds,
    and replicas of data-parallel tables become those of rank 0. ``module`` itself is not changed.

    Args:
        module: the collection; tables on meta are allocated on ``device`` and initialised.
        plan: the sharding of each table.
        env: an environment with a process group.
        device: device of the shards; None for that of the tables (the CPU if they are on ``meta``).
        fused_params: settings of fused optimizers that the tables do not have themselves, in the format of TorchRec's
            sharders. On compute kernel ``fused`` a table always has a fused optimizer: FBGEMM's SGD if nothing else.
        dense_as_torchrec: on compute kernel ``dense`` a table has no fused optimizer, whatever is attached to it.
        host_group: the process group for ids, if it is not that of ``env``.
        path: fully qualified name of the collection in the model.

    Raises:
        ConversionError: the same as ``read_plan``; ``unsupported_fused_param``, ``no_process_group``.
    """
    path = path or module.collection
    sharding = read_plan(module.tables, plan, env.rank, env.world_size, path)
    groups = DistGroups.of(env, sharding.local_size, host_group)
    local = make_local_tables(
        module, sharding, groups.pooled, device, fused_params, dense_as_torchrec=dense_as_torchrec
    )
    return SHARDED[kind_of(module)](module, sharding, groups, local)
