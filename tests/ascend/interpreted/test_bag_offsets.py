"""The kernel that checks batches: what it says is right is right, and it says so of every ordinary batch."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings

from recfx.kernels.lookup import bag_offsets as operators
from recfx.kernels.lookup import bag_offsets_triton as kernel
from recfx.kernels.lookup.bag_offsets import LARGEST, NOTHING
from tests.kernels.bags import batches, plain


@settings(max_examples=200)
@given(batches())
def test_equals_a_plain_loop(batch: tuple[Any, ...]) -> None:
    values, bags, are_offsets, per_key, rows, ids, bags_dtype = batch
    offsets, (kind, _) = plain(values, bags, are_offsets, per_key, rows)
    bag_offsets = operators._by_kernel(
        torch.tensor(values, dtype=ids), torch.tensor(bags, dtype=bags_dtype), are_offsets, per_key, rows
    )
    if kind != NOTHING:
        assert bag_offsets is None
    elif bag_offsets is None:  # offsets may begin anywhere, but the kernel leaves what is unusual to the reference
        assert (are_offsets and min(bags) < 0) or max(rows) > LARGEST or not sum(per_key)
    else:
        assert bag_offsets.offsets.tolist() == offsets
        borders = [sum(per_key[:key]) for key in range(len(per_key) + 1)]
        assert bag_offsets.borders == [offsets[border] for border in borders]


def test_numbers_are_those_of_the_kernel() -> None:
    assert (kernel.LARGEST.value, kernel.LANES.value) == (LARGEST, operators._LANES)
