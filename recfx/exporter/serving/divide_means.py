"""``mean_divide`` of an exported graph: completes the means of a lookup that also has sums."""

import torch

from recfx.exporter.serving.bags import Bags, ServedNode
from recfx.ir.tables import TableSpec


class DivideMeans(ServedNode):
    """Divide the columns of MEAN features by ``max(length, 1)``; ids without a row count in the length.

    Args:
        tables: the tables whose columns these are, in order.
        divided: the names of those that are MEAN.
        features: the output keys of the whole collection, in order.
    """

    def __init__(self, tables: tuple[TableSpec, ...], divided: tuple[str, ...], features: tuple[str, ...]) -> None:
        super().__init__()
        self.divided = list(divided)
        self.num_features = len(features)
        place = {name: number for number, name in enumerate(features)}
        self.widths = [table.embedding_dim for table in tables for _ in table.embedding_names]
        self.positions = [
            place[name] if table.name in divided else -1 for table in tables for name in table.embedding_names
        ]

    def forward(self, pooled: torch.Tensor, bags: Bags) -> torch.Tensor:
        """``pooled``: ``[B, sum D]``; ``bags``: the collection's ids or rows. Returns ``[B, sum D]``."""
        batch_size = (bags.offsets.numel() - 1) // self.num_features
        lengths = bags.offsets.diff().view(self.num_features, batch_size)
        divisors = lengths.clamp(min=1).to(pooled.dtype)
        parts: list[torch.Tensor] = []
        for part, position in zip(pooled.split(self.widths, dim=1), self.positions):  # noqa: B905  TorchScript
            parts.append(part if position < 0 else part / divisors[position].unsqueeze(1))
        return torch.cat(parts, dim=1)
