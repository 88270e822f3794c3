"""``keyed_tensor`` of an exported graph: pooled columns in TorchRec's output type."""

import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from recfx.exporter.serving.bags import ServedNode
from recfx.ir.tables import Columns


class AssembleColumns(ServedNode):
    """Concatenate pooled parts, put their columns into the standard collection's order, and name them.

    Args:
        keys: the output keys, in order.
        dims: the number of columns of each key.
        parts: the columns of each input, in order.
    """

    order: torch.Tensor

    def __init__(self, keys: list[str], dims: list[int], parts: list[list[Columns]]) -> None:
        super().__init__()
        self.keys = keys
        self.dims = dims
        begins, begin = {}, 0
        for columns in (each for part in parts for each in part):
            begins[columns.key] = begin
            begin += columns.dim
        order = [begins[key] + column for key, dim in zip(keys, dims, strict=True) for column in range(dim)]
        self.is_ordered = order == list(range(len(order)))
        self.register_buffer("order", torch.tensor(order))

    def forward(self, pooled: list[torch.Tensor]) -> KeyedTensor:
        """``pooled``: one ``[B, sum D]`` tensor per input. Returns the ``[B, D]`` keyed tensor."""
        values = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        if not self.is_ordered:
            values = values.index_select(1, self.order)
        return KeyedTensor(self.keys, self.dims, values)
