"""``mean_divide``: completes a MEAN whose lookup ran as SUM."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.ir.tables import Columns, KeyOrder, TableSpec
from recfx.runtime.base import NodeModule


class MeanDivide(NodeModule):
    """Divide the columns of MEAN features by ``max(length, 1)``.

    The length of a bag is taken before hashing: an id without a row still counts.

    Args:
        tables: the tables whose columns these are.
        divided: the names of the tables that are MEAN.
        features: the output keys of the whole collection, in the order of the KJT's keys.
        columns: the columns of the input, in order.
    """

    def __init__(
        self, tables: tuple[TableSpec, ...], divided: tuple[str, ...], features: tuple[str, ...], columns: list[Columns]
    ) -> None:
        super().__init__()
        self.divided = divided
        self.features = KeyOrder.of(features)
        by_length = set(divided)
        keys = {name for table in tables if table.name in by_length for name in table.embedding_names}
        self._widths: list[int] = []
        self._positions: list[int] = []  # in the KJT; -1 if not divided
        for part in columns:
            position = self.features.positions[part.key] if part.key in keys else -1
            if position < 0 and self._positions and self._positions[-1] < 0:
                self._widths[-1] += part.dim
            else:
                self._widths.append(part.dim)
                self._positions.append(position)

    def forward(self, pooled: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        """``pooled``: ``[B, sum D]``; ``features``: the ids as selected, before hashing. Returns ``[B, sum D]``."""
        batch_size = features.stride()
        lengths = features.lengths().view(len(self.features), batch_size)
        if pooled.device.type not in ("cpu", "meta") and type(pooled) is Tensor:  # fake ones must not be kept
            # However many features are averaged, the host starts as many operators.
            one = _one(batch_size, lengths.dtype, lengths.device)
            divisors = torch.cat([lengths.clamp(min=1), one]).to(pooled.device, pooled.dtype)
            rows = _rows_of_columns(tuple(self._widths), tuple(self._positions), len(self.features), pooled.device)
            return pooled / divisors.index_select(0, rows).t()
        divisors = lengths.clamp(min=1).to(pooled.device, pooled.dtype)
        parts = [
            part if position < 0 else part / divisors[position].unsqueeze(1)
            for part, position in zip(pooled.split(self._widths, dim=1), self._positions, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@lru_cache(maxsize=256)
def _rows_of_columns(widths: tuple[int, ...], positions: tuple[int, ...], other: int, device: torch.device) -> Tensor:
    """int64 ``[sum of the widths]``: of each column, its position; ``other`` where that is negative."""
    rows = torch.tensor([other if position < 0 else position for position in positions], device="cpu")
    return rows.repeat_interleave(torch.tensor(widths, device="cpu")).to(device)


@lru_cache(maxsize=256)
def _one(batch_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The lengths of a feature that is not divided."""
    return torch.ones(1, batch_size, dtype=dtype, device="cpu").to(device)
