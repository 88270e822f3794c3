"""How many ids fit: against simulation, against closed forms, against an index."""

from __future__ import annotations

import pytest
import torch

from recfx import HashConfig, HashIndex, TableFullError
from recfx.hashing.usable_share import expected_room, rows_for, usable_share


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


def test_usable_share_is_the_room_of_an_empty_index() -> None:
    assert usable_share(640, 64) == pytest.approx(expected_room(torch.full((64,), 10)) / 640)
    assert usable_share(12345, 1) == 1.0
    assert 0.96 < usable_share(64 * 4096, 64) < 0.97  # the default buckets cost little
    shares = [usable_share(rows, 64) for rows in (64, 640, 6400, 64_000, 64_000_000)]
    assert shares == sorted(shares)
    assert shares[-1] < 1


def fill(index: HashIndex) -> None:
    for first in range(0, 2 * index.config.rows, 4):
        index.find_or_insert(torch.arange(first, first + 4))


def test_usable_share_of_a_real_index() -> None:
    taken = 0
    for seed in range(40):
        index = HashIndex(1600, config=HashConfig(buckets=16, seed=seed))
        with pytest.raises(TableFullError):
            fill(index)
        taken += len(index)
    assert taken / (40 * 1600) == pytest.approx(usable_share(1600, 16), abs=0.02)


@pytest.mark.parametrize("buckets", [1, 8, 64, 4096])
@pytest.mark.parametrize("ids", [1, 999, 1_000_000])
def test_rows_for(ids: int, buckets: int) -> None:
    rows = rows_for(ids, buckets, 0.7)
    assert rows >= buckets
    assert usable_share(rows, buckets) * rows * 0.7 >= ids * 0.999
    fewer = int(rows / 1.13) - 1
    assert fewer < buckets or usable_share(fewer, buckets) * fewer * 0.7 < ids
    assert len(str(rows).rstrip("0")) <= 2
