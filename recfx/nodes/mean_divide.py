"""``mean_divide``: finish a MEAN whose lookup ran as SUM."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.ir.tables import TableSpec
from recfx.nodes.base import NodeModule


class MeanDivide(NodeModule):
    """Divide the columns of MEAN features by ``max(length, 1)``.

    The length is the bag's length before hashing: an id without a row still counts (design, section 4).

    Args:
        tables: the lookup's tables, in its column order.
        divided: names of those that are MEAN.
        features: output keys of the whole collection, in the order of the KJT's keys.
    """

    def __init__(self, tables: tuple[TableSpec, ...], divided: tuple[str, ...], features: tuple[str, ...]) -> None:
        super().__init__()
        self.tables = tables
        self.divided = divided
        self.features = features
        self._columns: list[tuple[int, int]] = []  # (embedding dim, position in the KJT or -1 where not divided)
        for table in tables:
            for name in table.embedding_names:
                position = features.index(name) if table.name in divided else -1
                self._columns.append((table.embedding_dim, position))

    def forward(self, pooled: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        """``pooled``: ``[B, sum D]``; ``features``: the ids as selected, before hashing. Returns ``[B, sum D]``."""
        batch_size = features.stride()
        lengths = features.lengths().view(len(self.features), batch_size)
        divisors = lengths.clamp(min=1).to(pooled.dtype)
        parts = []
        for part, (_, position) in zip(
            pooled.split([dim for dim, _ in self._columns], dim=1), self._columns, strict=True
        ):
            parts.append(part if position < 0 else part / divisors[position].unsqueeze(1))
        return torch.cat(parts, dim=1)
