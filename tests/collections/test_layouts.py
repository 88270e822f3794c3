"""Batches and gradients that are strided, expanded, negated or begin inside another tensor train as contiguous ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward

import recfx
from tests.support.layouts import LAYOUTS, batch_of_two, contiguous, laid_out, standard, trained

KINDS = ["pooled", "weighted", "sequence"]


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
