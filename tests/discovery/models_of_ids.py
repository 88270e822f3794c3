"""Models that do something to their ids before a collection reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from recfx.discovery.discover import discover
from recfx.discovery.sample import Sample
from recfx.ir.tables import IdRange

_REMAP = torch.tensor([40, 3, 96, 7])
_BORDERS = torch.tensor([1.5, 2.5, 10.0])


class Shift(nn.Module):
    """A module of the user's, whose code is not traced: it changes its argument."""

    def forward(self, ids: Tensor) -> Tensor:
        return ids.add_(500)


class Model(nn.Module):
    """Does something to its ids before they reach the collection."""

    def __init__(self, change: Callable[[Any, Tensor], Any], rows: int = 100) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=rows, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[table])
        self.change = [change]
        self.register_buffer("remap", _REMAP.clone(), persistent=False)
        self.register_buffer("learned", _REMAP.clone())
        self.shift, self.passes_on = Shift(), nn.Threshold(5, 500, inplace=True)
        self.register_buffer("borders", _BORDERS.clone())

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        changed = self.change[0](self, features.values())
        lengths = features.lengths()
        return self.ebc(KeyedJaggedTensor(keys=["f"], values=changed, lengths=lengths)).values()


def batch(ids: list[int] | Tensor) -> KeyedJaggedTensor:
    values = torch.as_tensor(ids)
    return KeyedJaggedTensor(["f"], values, lengths=torch.tensor([values.numel()]))


def range_of(model: nn.Module, *sample: Any) -> IdRange | None:
    """What the trace knows of the ids of feature ``f``."""
    (finding,) = discover(model, Sample.of(sample)).findings
    assert finding.found == "traced"
    return finding.id_ranges.get("f")


def extremes(dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    near = torch.arange(-40, 41)
    return torch.cat([near, limits.min + torch.arange(60), limits.max - torch.arange(60)]).to(dtype)
