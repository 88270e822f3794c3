"""The other batches on which a file is compared with its model."""

from __future__ import annotations

import torch
from torch import nn

import recfx
from recfx.exporter.compare_outputs import other_batches


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
