"""Small models: a collection, by default that of :func:`collection`, and what reads it."""

from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.builders.collections import collection


class Block(nn.Module):
    """Returns what its collection returns."""

    def __init__(self, ebc: nn.Module | None = None) -> None:
        super().__init__()
        self.ebc: Any = ebc or collection()

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(features)


class Pooled(Block):
    """``[B, sum D]``."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(features).values()


class Over(Block):
    """A layer over the columns."""

    def __init__(self, ebc: nn.Module | None = None, columns: int = 24, outputs: int = 1) -> None:
        super().__init__(ebc)
        self.over = nn.Linear(columns, outputs)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values())
