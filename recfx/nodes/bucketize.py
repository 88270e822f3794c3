"""``bucketize``: row-wise routing, each id to the rank that owns its row or its bucket of rows."""

from __future__ import annotations

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.kernels.bucketize import Routes, bucketize
from recfx.nodes.base import NodeModule


class Bucketize(NodeModule):
    """Copy each feature to the ranks of its shards; where rows are cut, each id to one of them.

    Args:
        routes: by key that leaves, rank after rank: see ``recfx.kernels.bucketize``.
        keys: their names.
    """

    def __init__(self, routes: Routes, keys: list[str]) -> None:
        super().__init__()
        self.routes = routes
        self.keys = keys

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features``: as selected. Gives rows of the shard where a table has no index, else raw ids."""
        device, weights = features.values().device, features.weights_or_none()
        values, lengths, weights = bucketize(
            features.values().cpu(),
            features.lengths().cpu(),
            features.stride(),
            self.routes,
            None if weights is None else weights.cpu(),
        )
        routed = KeyedJaggedTensor(self.keys, values, weights, lengths=lengths, stride=features.stride())
        return routed if device.type == "cpu" else routed.to(device)
