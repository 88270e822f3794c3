"""Devices that are not there, and tensors on the wrong one: one clear error each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection

import recfx
from recfx.errors import ConversionError, InputError
from tests.builders.batches import batch
from tests.builders.collections import table


def collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([table("t", ["f"])])


ABSENT: dict[str, Callable[[], Any]] = {
    "convert": lambda: recfx.convert(collection(), device="npu:7"),
    "pipeline": lambda: recfx.TrainPipeline(
        recfx.convert(collection()), torch.optim.SGD([torch.zeros(1)]), torch.device("npu:7")
    ),
}


@pytest.mark.parametrize("name", ABSENT)
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(ConversionError) as caught:
        ABSENT[name]()
    assert caught.value.reason == "device_unavailable"
    assert "npu:7" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ids_on_another_npu() -> None:
    model = recfx.convert(collection(), device="npu:1")
    with pytest.raises(InputError, match="the batch is on npu:0, but table 't' is on npu:1") as caught:
        model(batch(2, ("f",)).to(torch.device("npu:0")))
    assert caught.value.reason == "several_devices"
