"""``keyed_tensor``: put the lookups' columns into TorchRec's output type, in the standard collection's key order."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from recfx.nodes.base import NodeModule


class AssembleKeyedTensor(NodeModule):
    """Concatenate pooled parts and name their columns.

    Args:
        keys: output keys, in the standard collection's order.
        dims: columns of each key.
        parts: for each input, the keys it holds, in its column order.
    """

    def __init__(self, keys: list[str], dims: list[int], parts: list[list[str]]) -> None:
        super().__init__()
        self.keys = keys
        self.dims = dims
        self.parts = parts
        arrived = [key for part in parts for key in part]
        dim_of = dict(zip(keys, dims, strict=True))
        self._part_dims = [[dim_of[key] for key in part] for part in parts]
        self._order = None if arrived == keys else [arrived.index(key) for key in keys]

    def forward(self, *pooled: torch.Tensor) -> KeyedTensor:
        """``pooled``: one ``[B, sum D]`` an input. Returns the ``[B, D]`` keyed tensor."""
        if self._order is None:
            values = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        else:
            split = [part.split(dims, dim=1) for part, dims in zip(pooled, self._part_dims, strict=True)]
            columns = [column for part in split for column in part]
            values = torch.cat([columns[position] for position in self._order], dim=1)
        return KeyedTensor(keys=self.keys, length_per_key=self.dims, values=values)
