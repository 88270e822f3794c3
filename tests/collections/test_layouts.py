"""Batches and gradients that are strided, expanded, negated or begin inside another tensor train as contiguous ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor

import recfx
from tests.builders.collections import sequence_table, table
from tests.support.layouts import LAYOUTS, contiguous, laid_out

KEYS = ["a", "b"]
KINDS = ["pooled", "weighted", "sequence"]


def standard(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "sequence":
        return EmbeddingCollection([sequence_table("t", ["a"]), sequence_table("u", ["b"])])
    return EmbeddingBagCollection([table("t", ["a"]), table("u", ["b"])], is_weighted=kind == "weighted")


def output(collection: Any, features: KeyedJaggedTensor) -> Tensor:
    answer = collection(features)
    rows: Tensor = torch.cat([answer[key].values() for key in KEYS]) if isinstance(answer, dict) else answer.values()
    return rows


def batch_of_two() -> KeyedJaggedTensor:
    """Two ids in every bag, so that equal lengths fit them."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (16,), generator=draw)
    return KeyedJaggedTensor(KEYS, ids, torch.rand(16, generator=draw), torch.full((8,), 2))


def trained(collection: Any, features: KeyedJaggedTensor, layout: Any) -> list[Tensor]:
    """What two steps leave: outputs, weights and gradients."""
    outputs = []
    for _ in range(2):
        out = output(collection, features)
        out.backward(layout(torch.linspace(-1, 1, out.numel()).view(out.shape)))
        outputs.append(out.detach())
    gradients = [weight.grad for weight in collection.parameters() if weight.grad is not None]
    return [*outputs, *(weight.detach() for weight in collection.parameters()), *gradients]


@pytest.mark.parametrize("hashing", [recfx.HashConfig(), recfx.HashConfig.raw_ids()], ids=["adopted", "raw"])
@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_trains_as_a_contiguous_one(kind: str, optimizer: Any, hashing: recfx.HashConfig) -> None:
    def converted() -> Any:
        collection = recfx.convert(standard(kind), hashing=hashing)
        if optimizer is not None:
            _apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": 0.5})
        return collection

    features = batch_of_two()
    for name, layout in LAYOUTS.items():
        for part in ("values", "lengths", "weights"):
            expected = laid_out(features, part, lambda tensor, layout=layout: contiguous(layout(tensor)))
            given = trained(converted(), laid_out(features, part, layout), layout)
            reference = trained(converted(), expected, lambda tensor, layout=layout: contiguous(layout(tensor)))
            for actual, of_contiguous in zip(given, reference, strict=True):
                assert torch.equal(actual, of_contiguous), (name, part)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_any_layout_are_those_of_the_standard_collection(kind: str, layout: Any) -> None:
    plain = standard(kind)
    converted = recfx.convert(copy.deepcopy(plain))
    features = batch_of_two()
    for actual, expected in zip(trained(converted, features, layout), trained(plain, features, layout), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)
