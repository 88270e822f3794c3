"""Models that reach their collection by another way than a registered module, and what their conversions must do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from recfx.collections.pooled import HashEmbeddingBagCollection
from tests.builders.batches import batch
from tests.builders.collections import collection


class Block(nn.Module):
    """Something around a collection: what refers to it must get its copy."""

    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(features)


class Reaching(nn.Module):
    """Its collection is registered inside a block, and called by another way."""

    def __init__(self, way: Callable[[Reaching], None]) -> None:
        super().__init__()
        self.block = Block(collection())
        self.over = nn.Linear(24, 1)
        way(self)

    def lookup(self, features: KeyedJaggedTensor) -> Any:
        raise NotImplementedError

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.lookup(features).values())


class Helper:
    def __init__(self, module: Any) -> None:
        self.module, self.calls = module, 0

    def __call__(self, features: KeyedJaggedTensor) -> Any:
        self.calls += 1
        return self.run(features)

    def run(self, features: KeyedJaggedTensor) -> Any:
        return self.module(features)


TARGETS: dict[str, Callable[[Reaching], nn.Module]] = {
    "collection": lambda model: model.block.ebc,
    "block": lambda model: model.block,
}


def assert_converted_is_called(model: nn.Module, converted: nn.Module, collection: HashEmbeddingBagCollection) -> None:
    """The converted model calls its converted collection and no standard one; both models still agree."""
    calls: list[str] = []
    handle = collection.graph_module.register_forward_pre_hook(lambda *_: calls.append("converted"))
    forward = EmbeddingBagCollection.forward
    features = batch(5)
    converted(features)
    assert calls == ["converted"]
    handle.remove()
    torch.testing.assert_close(converted(features), model(features), rtol=1e-5, atol=1e-6)
    assert EmbeddingBagCollection.forward is forward
