"""The order of positions, against a stable sort of int64, and what is sorted for it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from recfx.kernels.build import launch
from recfx.kernels.step.step_order import step_keys, step_order

SIZES = st.sampled_from([1, 3, 40, 2**15 - 4, 2**24 - 44, 2**24, 2**24 + 1, 2**31 - 4, 2**31, 2**38 - 4, 2**40])


class Sorts(TorchDispatchMode):
    """Notes the dtype of all that is sorted, and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sort.stable:
            self.seen.append((args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


def sorted_as(table_rows: list[int], on_gpu: bool) -> list[torch.dtype]:
    total = sum(table_rows)
    if not on_gpu:
        return [torch.int64] if max(table_rows) >= 2**31 else [torch.float32] * (1 + (total > 2**24))
    if total < 2**31:
        return [torch.int16 if total < 2**15 else torch.int32]
    return [torch.int32, torch.int8 if total <= 2**38 else torch.int16]


@settings(max_examples=120)
@given(
    st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 2**32),
    st.booleans(),
    st.booleans(),
)
def test_is_stable(tables: list[tuple[int, bool]], batch_size: int, seed: int, is_weighted: bool, on_gpu: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    table_rows, is_stepped = [count for count, _ in tables], [stepped for _, stepped in tables]
    table_of_feature = [*range(len(tables)), 0]
    lengths = torch.randint(0, 30, (len(table_of_feature), batch_size), generator=draw)
    rows = []
    for table, count in zip(table_of_feature, lengths.sum(1).tolist(), strict=True):
        few = torch.tensor([-1, 0, 1, 2**24 - 1, 2**24, 2**31 - 2, table_rows[table] - 1]).clamp(
            max=table_rows[table] - 1
        )
        rows.append(few[torch.randint(0, few.numel(), (count,), generator=draw)])
    lengths, asked = lengths.view(-1), torch.cat(rows)
    if asked.numel() == 0:
        return
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    scales = torch.rand(asked.numel(), generator=draw) if is_weighted else None
    with pytest.MonkeyPatch.context() as patch, Sorts() as sorts:
        patch.setattr(launch, "takes_gpu_forms", lambda device: on_gpu)
        ordered = step_order(asked, offsets, lengths, table_rows, table_of_feature, is_stepped, scales)
    assert sorts.seen == [(dtype, asked.numel()) for dtype in sorted_as(table_rows, on_gpu)]

    starts = [sum(table_rows[:table]) for table in range(len(tables))]
    bags = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    keys = [
        starts[table] + row if row >= 0 and is_stepped[table] else -1
        for row, table in zip(asked.tolist(), [table_of_feature[bag // batch_size] for bag in bags], strict=True)
    ]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    assert ordered.keys.tolist() == [keys[position] for position in order]
    assert ordered.bags.tolist() == bags[order].tolist()
    assert ordered.bags.dtype == torch.int32
    assert (ordered.scales is None) == (scales is None)
    assert scales is None or torch.equal(ordered.scales, scales[order])


@pytest.mark.parametrize(("bases", "keys"), [([0, 10], [3, -1, 12]), ([0, -1], [3, -1, -1])])
def test_keys_in_aten(bases: list[int], keys: list[int]) -> None:
    assert step_keys(torch.tensor([3, -1, 2]), torch.tensor([0, 1, 2, 2, 3]), bases).tolist() == keys
