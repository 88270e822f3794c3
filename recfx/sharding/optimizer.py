"""TorchRec's view of the fused optimizers of a sharded collection."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torchrec.optim.keyed import KeyedOptimizer

from recfx.collection import weight_name
from recfx.nodes import TableStore
from recfx.sharding.shards import CollectionSharding
from recfx.training.keyed_optimizer import FusedKeyedOptimizer


def sharded_optimizer(sharding: CollectionSharding, store: TableStore, group: dist.ProcessGroup) -> KeyedOptimizer:
    parameters = {weight_name("", name): store.weight(name) for name in store.optimizers}
    groups = [optimizer.group for optimizer in store.optimizers.values()]
    state: dict[Any, Any] = {parameter: {} for parameter in parameters.values()}
    return FusedKeyedOptimizer(parameters, state, groups, {}, dict.fromkeys(parameters, 0.0))
