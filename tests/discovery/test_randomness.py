"""Checks have random numbers of their own, and leave those of the caller alone."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from recfx.discovery.sample import fixed_randomness


def numbers() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), numpy.random.random()


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_numbers_go_on_as_if_nothing_had_happened(fails: bool) -> None:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    expected = [numbers(), numbers()]
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    first = numbers()
    if fails:
        with pytest.raises(RuntimeError), fixed_randomness():
            raise RuntimeError
    else:
        with fixed_randomness():
            numbers()
    assert [first, numbers()] == expected


def test_the_same_seed_gives_the_same_numbers() -> None:
    found = []
    for seed in (0, 0, 3):
        with fixed_randomness(seed):
            found.append(numbers())
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])


@pytest.mark.parametrize("warn_only", [False, True])
def test_whether_torch_is_deterministic_is_as_before(warn_only: bool) -> None:
    torch.use_deterministic_algorithms(not warn_only, warn_only=warn_only)
    try:
        with fixed_randomness():
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled() != warn_only
    finally:
        torch.use_deterministic_algorithms(False)
