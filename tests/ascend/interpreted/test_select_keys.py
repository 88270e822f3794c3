"""The operator that copies keys: what it copies."""

from __future__ import annotations

import pytest
import torch

from recfx.kernels.route.select_keys import select_keys

OFFSETS = torch.tensor([0, 2, 2, 3, 3, 3, 6])
IDS, WEIGHTS = torch.arange(10, 16), torch.arange(6) / 4


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_copies_bags(weights: torch.Tensor | None) -> None:
    ids, offsets, new_weights = select_keys(IDS, OFFSETS, [2, 0, 1, 2], 3, [2, 1, 3], weights)
    assert ids.tolist() == [13, 14, 15, 10, 11, 12, 13, 14, 15]
    assert offsets.tolist() == [0, 0, 3, 5, 5, 6, 6, 6, 9]
    assert (new_weights is None) == (weights is None)
    assert new_weights is None or new_weights.tolist() == [0.75, 1.0, 1.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25]
