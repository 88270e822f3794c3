"""The other batches on which a file is compared with its model."""

from __future__ import annotations

import torch
from torch import nn

import recfx
from recfx.exporter.compare_outputs import other_batches, resized


class AddsOnesOfFourSamples(nn.Module):
    """Takes batches of four samples, and what can be broadcast to them."""

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        return dense + torch.ones(4, 2)


def test_a_batch_of_one_is_not_compared_where_a_bigger_one_is_refused() -> None:
    """What is added is not of the batch: the answer to one sample has four."""
    model, sample = AddsOnesOfFourSamples(), recfx.Sample(torch.zeros(4, 2))
    assert list(other_batches(model, sample)) == []
    assert resized(model, sample) is None


def test_the_batches_that_a_model_takes_are_compared() -> None:
    model, sample = nn.Linear(2, 1), recfx.Sample(torch.zeros(4, 2))
    sizes = {name: len(answer) for name, _, answer in other_batches(model, sample)}
    assert sizes == {"a bigger batch": 5, "a batch of one": 1}
