"""How many ids fit: against simulation, against closed forms, against an index."""

from __future__ import annotations

import pytest
import torch

from recfx.hashing.expected_room import expected_room


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
