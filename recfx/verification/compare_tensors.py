"""How two tensors differ, and how much."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Difference:
    """A difference between two runs.

    Args:
        where: the value that differs.
        message: how they differ.
    """

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def compare_tensors(
    where: str, expected: torch.Tensor, actual: torch.Tensor, rtol: float, atol: float
) -> Difference | None:
    """The difference; None if shape and dtype are equal and the values are close."""
    if expected.shape != actual.shape:
        return Difference(where, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if expected.dtype != actual.dtype:
        return Difference(where, f"dtype {actual.dtype} instead of {expected.dtype}")
    if torch.allclose(expected, actual, rtol=rtol, atol=atol, equal_nan=True):
        return None
    return Difference(where, f"largest difference {largest_difference(expected, actual):.3g}")


def largest_difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """The largest absolute difference: 0 for empty tensors; inf if one has a NaN or the shapes differ."""
    expected, actual = expected.detach(), actual.detach()
    if expected.shape != actual.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    same = (expected == actual) | (expected.isnan() & actual.isnan())  # inf - inf is NaN, too
    difference = (expected.double() - actual.double()).abs().masked_fill(same, 0.0)
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())
