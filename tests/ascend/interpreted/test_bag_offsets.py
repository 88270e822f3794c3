"""The kernel that checks batches: what it says is right is right, and it says so of every ordinary batch."""

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
    counts = per_key * len(rows) if len(per_key) == 1 else per_key
    if len(counts) != len(rows) or sum(counts) != len(bags) - are_offsets or not sum(counts) or max(rows) > LARGEST:
        return  # which the reference checks
    given = torch.tensor(values, dtype=ids), torch.tensor(bags, dtype=bags_dtype)
    launched, reports = operators.bag_offsets_triton(*given, are_offsets, counts, rows)
    if any(reports[len(rows) + 1 :]):  # offsets may begin anywhere, but not for the kernel
        assert kind != NOTHING or (are_offsets and min(bags) < 0)
    else:
        assert kind == NOTHING
        assert launched.tolist() == offsets
        borders = [sum(counts[:key]) for key in range(len(counts) + 1)]
        assert reports[: len(rows) + 1].tolist() == [offsets[border] for border in borders]


def test_numbers_are_those_of_the_kernel() -> None:
    assert (kernel.LARGEST.value, kernel.LANES.value) == (LARGEST, operators._LANES)
