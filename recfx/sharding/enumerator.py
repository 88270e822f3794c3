"""TorchRec's search space, with what it leaves out: the memory of indexes, and a fixed order."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Storage
from torchrec.distributed.types import ModuleSharder, ShardingType

from recfx.collection import HashEmbeddingBagCollection
from recfx.sharding.sharder import SHARDING_TYPES


class IndexStorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's estimate of storage, and the host memory of each shard's part of the table's index.

    TorchRec's planner does not ask the sharder (``storage_usage`` is not called), so this is where it can be counted.
    """

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        """Set the storage of every shard, in bytes."""
        super().estimate(sharding_options, sharder_data_map)
        for option in sharding_options:
            index = index_bytes(option.module[1], option.name)
            for shard in option.shards:
                rows = shard.size[0]
                shard.storage += Storage(hbm=0, ddr=math.ceil(index * rows / option.tensor.shape[0]))


def index_bytes(module: nn.Module, table: str) -> int:
    """Bytes of host memory that the index of a table takes, 0 without one; known on the meta device too."""
    if not isinstance(module, HashEmbeddingBagCollection) or table not in module.hash_indexes:
        return 0
    return sum(buffer.numel() * buffer.element_size() for buffer in module.index(table).buffers())


class OrderedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, in an order that does not depend on the process.

    TorchRec goes through Python sets of strings, whose order is another in every process; it must not decide among
    equally good plans. Options that its planner refuses once it has chosen them are not offered: ``dense`` for anything
    but data parallel tables.

    Args:
        topology: what is planned for.
        batch_size: samples a rank.
        constraints: by table name.
    """

    def __init__(
        self, topology: Topology, batch_size: int, constraints: dict[str, ParameterConstraints] | None
    ) -> None:
        estimators = [EmbeddingPerfEstimator(topology, constraints), IndexStorageEstimator(topology, constraints)]
        super().__init__(topology, batch_size, constraints, estimators)

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Every way to shard every table, with time and storage estimated."""
        options: list[ShardingOption] = super().enumerate(module, sharders)
        places = {fqn: place for place, fqn in enumerate(dict.fromkeys(option.fqn for option in options))}
        return sorted(
            filter(plannable, options),
            key=lambda option: (
                places[option.fqn],
                SHARDING_TYPES.index(option.sharding_type),
                option.compute_kernel,
            ),
        )


def plannable(option: ShardingOption) -> bool:
    """Whether TorchRec's planner accepts the option in its result."""
    return option.compute_kernel != "dense" or option.sharding_type == ShardingType.DATA_PARALLEL.value
