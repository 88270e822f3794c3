"""How two tensors differ, and whether two models make the same step, at two batch sizes."""

import pytest
import torch
from torch import nn

from recfx.models.compare_models import Difference, compare_forward
from recfx.models.sample import Sample

GENERATOR = torch.Generator()


class Scaled(nn.Module):
    """A layer; ``extra`` is added to the outputs of batches of ``only`` samples."""

    def __init__(self, only: int = -1, extra: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.only, self.extra, self.noise = only, extra, noise

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        added = self.extra if dense.shape[0] == self.only else 0.0
        return dense * self.scale + added + self.noise * torch.rand((), generator=GENERATOR)


SAMPLE = Sample(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("size", "differs"), [(3, True), (4, True), (5, False)])
def test_both_batch_sizes_are_compared(size: int, differs: bool, training: bool) -> None:
    """The sample's three samples, and one more."""
    difference = compare_forward(Scaled(), Scaled(size, 0.5), SAMPLE, training)
    assert (difference is None) != differs
    if differs:
        assert isinstance(difference, Difference)
        assert (difference.where, difference.message) == ("outputs 0", "largest difference 0.5")


def test_a_model_that_differs_from_itself_is_not_to_blame() -> None:
    assert compare_forward(Scaled(noise=1.0), Scaled(noise=1.0), SAMPLE, True) is None


def test_what_the_first_model_cannot_do_is_not_compared() -> None:
    class Picky(Scaled):
        def forward(self, dense: torch.Tensor) -> torch.Tensor:
            if dense.shape[0] != 3:
                raise ValueError("three, please")
            return super().forward(dense)

    assert compare_forward(Picky(), Scaled(4, 0.5), SAMPLE, True) is None
    failed = compare_forward(Picky(), Scaled(), Sample(torch.ones(2, 2)), True)
    assert isinstance(failed, ValueError)
    assert str(failed) == "three, please"
    difference = compare_forward(Scaled(), Picky(), SAMPLE, True)
    assert difference == Difference("forward", "raises ValueError: three, please")
