"""``bucketize``: row-wise routing, which sends each id to the rank that owns its row or its bucket of rows."""

from __future__ import annotations

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.kernels.bucketize import Routes
from recfx.lowering.operators import BUCKETIZE, OperatorsByDevice
from recfx.runtime.base import NodeModule


class Bucketize(NodeModule):
    """Copy each feature to the ranks of its shards; if rows are cut, each id goes to only one of them.

    Args:
        routes: one per output key, rank by rank: see ``recfx.kernels.bucketize``.
        keys: the names of the output keys.
    """

    def __init__(self, routes: Routes, keys: list[str]) -> None:
        super().__init__()
        self.routes = routes
        self.keys = keys
        self._operators = OperatorsByDevice(BUCKETIZE)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features``: as selected. Returns rows of the shard if a table has no index, otherwise raw ids."""
        weights = features.weights_or_none()
        bucketize = self._operators.on(features.values().device).bucketize
        values, lengths, weights = bucketize(
            features.values(), features.lengths(), features.stride(), self.routes, weights
        )
        return KeyedJaggedTensor(self.keys, values, weights, lengths=lengths, stride=features.stride())
