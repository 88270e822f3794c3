"""How many ids fit: against simulation, against closed forms, against an index."""

from __future__ import annotations

import pytest
import torch

from recfx.hashing.expected_room import expected_room


def simulated_room(free: list[int], trials: int) -> float:
    """Mean number of balls thrown before one meets a full bin."""
    generator = torch.Generator().manual_seed(0)
    total = 0
    for _ in range(trials):
        thrown = torch.randint(len(free), (sum(free) + 1,), generator=generator)
        first_too_many = []
        for bucket, most in enumerate(free):
            balls = torch.nonzero(thrown == bucket).squeeze(1)
            if balls.numel() > most:
                first_too_many.append(int(balls[most]))
        total += min(first_too_many)
    return total / trials


@pytest.mark.parametrize(
    ("free", "trials", "tolerance"),
    [([1] * 8, 2000, 0.05), ([10] * 8, 1000, 0.02), ([200] * 16, 300, 0.01), ([0, 3, 3, 9], 2000, 0.05)],
)
def test_room_against_simulation(free: list[int], trials: int, tolerance: float) -> None:
    assert expected_room(torch.tensor(free)) == pytest.approx(simulated_room(free, trials), rel=tolerance)


@pytest.mark.parametrize(
    ("free", "room"),
    [
        ([7], 7.0),
        ([0], 0.0),
        ([0, 0], 0.0),
        ([1, 1], 1.5),  # the second id collides half of the time, the third always
        ([0, 10**6], 1.0),  # one side is full: two throws on average until it is hit
        ([1] * 365, 23.61658),  # the birthday problem: the first common birthday comes with person 24.61658
    ],
)
def test_closed_forms(free: list[int], room: float) -> None:
    assert expected_room(torch.tensor(free)) == pytest.approx(room, abs=5e-3)
