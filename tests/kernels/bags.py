"""Batches that are right, and that are wrong in every way, and what a plain loop says of them."""

from itertools import pairwise

import torch
from hypothesis import strategies as st

from recfx.kernels.lookup.bag_offsets import NEGATIVE_LENGTH, NOTHING, OUT_OF_RANGE, WRONG_TOTAL

FAR = [2**40, 1 - 2**40, 2**63 - 1, -(2**63), 2**62, 2**31 - 1, -(2**31)]


def plain(
    values: list[int], bags: list[int], are_offsets: bool, per_key: list[int], rows: list[int]
) -> tuple[list[int], tuple[int, int]]:
    """In Python's integers, which do not overflow."""
    lengths = [end - begin for begin, end in pairwise(bags)] if are_offsets else bags
    offsets = [0]
    for bag, length in enumerate(lengths):
        offsets.append(offsets[-1] + length)
        if length < 0 or offsets[-1] > len(values):
            return [], (NEGATIVE_LENGTH if length < 0 else WRONG_TOTAL, bag)
    if offsets[-1] != len(values):
        return [], (WRONG_TOTAL, len(lengths))
    bag = 0
    for count, limit in zip(per_key, rows, strict=True):
        for position in range(offsets[bag], offsets[bag + count]):
            if limit >= 0 and not 0 <= values[position] < limit:
                return offsets, (OUT_OF_RANGE, position)
        bag += count
    return offsets, (NOTHING, 0)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], bool, list[int], list[int], torch.dtype, torch.dtype]:
    per_key = draw(st.one_of(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.just([2, 2])))
    lengths = draw(st.lists(st.integers(0, 4), min_size=sum(per_key), max_size=sum(per_key)))
    ids, bags_dtype = (draw(st.sampled_from([torch.int32, torch.int64])) for _ in range(2))
    fits = [far for far in FAR if abs(far) < 2 ** (torch.iinfo(bags_dtype).bits - 1)]
    wrong = st.one_of(st.integers(-3, 6), st.sampled_from(fits))
    count = max(0, sum(lengths) + draw(st.sampled_from([0, 0, 0, -1, 1])))
    are_offsets = draw(st.booleans())
    bags = lengths
    if are_offsets:
        first = draw(st.sampled_from([0, 0, 3, -2]))
        bags = [first + sum(lengths[:bag]) for bag in range(len(lengths) + 1)]
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        if bags:
            bags[draw(st.integers(0, len(bags) - 1))] = draw(wrong)
    info = torch.iinfo(ids)
    id_ = st.one_of(st.integers(0, 2), st.integers(-1, 5), st.sampled_from([info.min, info.max]))
    values = draw(st.lists(id_, min_size=count, max_size=count))
    limit = st.sampled_from([-1, 3, 4, 2**31, 2**63 - 1])
    rows = draw(st.lists(limit, min_size=len(per_key), max_size=len(per_key)))
    return values, bags, are_offsets, per_key, rows, ids, bags_dtype
