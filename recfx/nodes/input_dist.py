"""``input_dist_start`` and ``input_dist_wait``: ids travel to the ranks whose shards they read.

One all-to-all for all tables of a collection, whatever their sharding types: each rank gets, one after the other, the
features of its shards. A feature of several shards is sent once a shard, one of a data-parallel table to every rank.
"""

from __future__ import annotations

from typing import TypeAlias

import torch.distributed as dist
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllTensorsAwaitable
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.nodes.bags import permute_features
from recfx.nodes.base import NodeModule
from recfx.nodes.dist_context import DistContext

Started: TypeAlias = Awaitable[KJTAllToAllTensorsAwaitable]


class InputDistStart(NodeModule):
    """Start the all-to-all.

    Args:
        group: of all ranks.
        splits: how many keys each rank gets.
        positions: which of the input's keys these are, rank after rank; None: they come in that order.
        keys: their names there.
    """

    def __init__(
        self, group: dist.ProcessGroup, splits: list[int], positions: list[int] | None, keys: list[str]
    ) -> None:
        super().__init__()
        self.positions = positions
        self.keys = keys
        self._dist = KJTAllToAll(group, splits)  # of this name and type, or TorchRec's pipelines do not know it

    def forward(self, features: KeyedJaggedTensor) -> tuple[Started, DistContext]:
        """``features``: this rank's batch. Returns what ``input_dist_wait`` waits for, and the batch's context."""
        if self.positions is not None:
            features = permute_features(features, self.positions, self.keys)
        return self._dist(features), DistContext(batch_size_per_feature_pre_a2a=features.stride_per_key())


class InputDistWait(NodeModule):
    """Wait for the ids of all ranks' batches, ordered feature, rank, sample."""

    def forward(
        self, started: Started | KeyedJaggedTensor, context: DistContext
    ) -> tuple[KeyedJaggedTensor, DistContext]:
        """``started``: or the ids themselves, if a pipeline has waited for them already."""
        if isinstance(started, KeyedJaggedTensor):
            return started, context
        tensors = started.wait()
        context.batch_size_per_rank = tensors._stride_per_rank
        return tensors.wait(), context
