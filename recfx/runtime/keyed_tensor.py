"""``keyed_tensor``: puts pooled columns into TorchRec's output type, in the standard collection's key order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from recfx.ir.columns import Columns
from recfx.runtime.base import NodeModule
from recfx.runtime.column_order import ColumnOrder


class AssembleKeyedTensor(NodeModule):
    """Concatenate pooled parts and name their columns.

    Args:
        keys: the output keys, in the standard collection's order.
        dims: the number of columns of each key.
        parts: the columns of each input, in order.
    """

    def __init__(self, keys: list[str], dims: list[int], parts: list[list[Columns]]) -> None:
        super().__init__()
        self.keys = keys
        self.dims = dims
        self.take_parts(parts)

    def take_parts(self, parts: list[list[Columns]]) -> None:
        """Change which columns the inputs hold."""
        self.parts, self.order = parts, keyed_order(self.keys, parts)

    def forward(self, *pooled: torch.Tensor) -> KeyedTensor:
        """``pooled``: one ``[B, sum D]`` tensor per input. Returns the ``[B, D]`` keyed tensor."""
        values = self.order(pooled, pooled[0].shape[0], pooled[0].device)
        return KeyedTensor(keys=self.keys, length_per_key=self.dims, values=values)


def keyed_order(keys: Sequence[str], parts: list[list[Columns]]) -> ColumnOrder:
    """The order of an output's columns.

    Args:
        keys: the output keys, in order.
        parts: the columns of each input, in order.
    """
    position = {key: number for number, key in enumerate(keys)}
    arrived = [columns for part in parts for columns in part]
    return ColumnOrder(parts, sorted(arrived, key=lambda each: (position[each.key], each.first)))
