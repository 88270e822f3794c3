"""How two tensors differ, and by how much."""

from __future__ import annotations

import math

import pytest
import torch

from recfx.verification.compare_models import Difference, compare_tensors, largest_difference

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("expected", "actual", "largest"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, -2.0], [1.5, -4.0], 2.0),
        ([1.0, NAN], [1.5, NAN], 0.5),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([1.0, 1.0], [NAN, 1.0], INF),
        ([INF, 1.0], [INF, 3.0], 2.0),
        ([INF, 1.0], [-INF, 1.0], INF),
        ([INF, 1.0], [2.0, 1.0], INF),
        ([], [], 0.0),
        ([1.0], [], INF),
        ([1.0], [[1.0]], INF),
        ([3], [1], 2.0),
        ([2**53 + 1], [2**53], 0.0),  # doubles do not tell them apart
        ([True, False], [True, True], 1.0),
        ([1], [1.5], 0.5),
    ],
)
def test_the_largest_difference(expected: list[float], actual: list[float], largest: float) -> None:
    assert largest_difference(torch.tensor(expected), torch.tensor(actual)) == largest
    assert largest_difference(torch.tensor(actual), torch.tensor(expected).requires_grad_(False)) == largest


@pytest.mark.parametrize(
    ("expected", "actual", "message"),
    [
        (torch.ones(2), torch.ones(2), None),
        (torch.ones(2, 3), torch.ones(3, 2), "shape (3, 2) instead of (2, 3)"),
        (torch.ones(2), torch.ones(2).double(), "dtype torch.float64 instead of torch.float32"),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), None),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), "largest difference inf"),
        (torch.tensor([100.0]), torch.tensor([109.0]), None),  # a tenth
        (torch.tensor([100.0]), torch.tensor([112.0]), "largest difference 12"),
        (torch.tensor([0.0]), torch.tensor([0.009]), None),  # a hundredth
        (torch.tensor([0.0]), torch.tensor([0.125]), "largest difference 0.125"),
    ],
)
def test_a_difference(expected: torch.Tensor, actual: torch.Tensor, message: str | None) -> None:
    found = compare_tensors("outputs 0", expected, actual, rtol=0.1, atol=0.01)
    assert found == (None if message is None else Difference("outputs 0", message))
    assert message is None or str(found) == f"outputs 0: {message}"
