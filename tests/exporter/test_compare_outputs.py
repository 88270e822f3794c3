"""The other batches on which a file is compared with its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import recfx
from recfx.exporter.compare_outputs import other_batches
from tests.builders.collections import collection
from tests.support.refusals import refused


class AddsOnesOfFourSamples(nn.Module):
    """Takes batches of four samples, and what can be broadcast to them."""

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        return dense + torch.ones(4, 2)


def test_a_batch_of_one_is_not_compared_where_a_bigger_one_is_refused() -> None:
    """What is added is not of the batch: the answer to one sample has four."""
    model, sample = AddsOnesOfFourSamples(), recfx.Sample(torch.zeros(4, 2))
    assert [name for name, _, _ in other_batches(model, sample)] == ["tensors that are not contiguous"]


def test_the_batches_that_a_model_takes_are_compared() -> None:
    model, sample = nn.Linear(2, 1), recfx.Sample(torch.zeros(4, 2))
    sizes = {name: len(answer) for name, _, answer in other_batches(model, sample)}
    assert sizes == {"a bigger batch": 5, "a batch of one": 1, "tensors that are not contiguous": 4}


class ReadsMemory(nn.Module):
    """What a careless kernel does."""

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(dense, dense.shape, (2, 1)) * 1.0


def test_a_model_that_reads_memory_itself_is_not_asked_for_strided_tensors() -> None:
    names = [name for name, _, _ in other_batches(ReadsMemory(), recfx.Sample(torch.ones(4, 2)))]
    assert names == ["a bigger batch", "a batch of one"]


class AsksForTheClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection(4)

    def forward(self, features: Any) -> torch.Tensor:
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled * 3 if isinstance(features, TensorDict) else pooled


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_file_answers_the_sample_as_the_model_does_itself(quantize: Any, tmp_path: Path) -> None:
    """A file hands on a KJT in the place of a TensorDict."""
    ids = torch.nested.nested_tensor_from_jagged(torch.arange(3), lengths=torch.tensor([2, 1]))
    sample = TensorDict(dict.fromkeys(("f1", "f2", "f3"), ids), batch_size=[])
    with refused("not_scriptable", match="answers differently", error=recfx.ExportError):
        recfx.export(AsksForTheClass(), tmp_path / "model", (sample,), quantize=quantize)
