"""The order in which a fused step takes the positions of a batch: by row, and where rows are equal, as in the batch.

So the gradients of a row are summed in the order of the batch, whatever the device. Positions are sorted by keys of
float32, which Ascend's AI Cores sort; int64 would go to its AI CPU, twenty times as slow. 24 bits fit, so there are two
stable passes if the tables have more rows together than that, and int64 has to do if one table has 2**31.

A GPU sorts all bits of a key, whatever they are: keys are int16 or int32 there, if the rows of all tables fit, and else
int32 and, in a second stable pass, int8. That is 40 bits instead of 64. To sort table by table would take fewer only
where each has less than 2**15 rows, and a sort for each; the host would have to wait for their sizes.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import launch

_LINE = 16  # float32 values of one cache line, into which one program writes
_LANES = 128  # positions of a program on a GPU
_ROWS = 2**31  # rows are int32 in the kernel
_MOST_BAGS = 2**31 - 1  # likewise
_KEPT = 256


class StepOrder(NamedTuple):
    """The positions of a batch, ordered."""

    # int64 [n], on a GPU as they were sorted if that was one pass; ascending: the row, counted through all tables; -1:
    # of no row
    keys: Tensor
    bags: Tensor  # int32 [n], the bag f * B + b; f * n + position if rows are not pooled
    scales: Tensor | None  # float32 [n], the per-sample weights


def step_order(
    rows: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    table_rows: Sequence[int],
    table_of_feature: Sequence[int],
    is_stepped: Sequence[bool],
    per_sample_weights: Tensor | None,
    unpooled: bool = False,
) -> StepOrder:
    """Order the positions of a batch.

    Args:
        rows: int64 ``[n]``, ``n > 0``; rows of -1, and rows of tables that are not stepped, get the key -1.
        offsets, lengths: int64 ``[F * B + 1]`` and ``[F * B]``, of the bags.
        table_rows, is_stepped: of each table.
        unpooled: each position is a bag of its own, of ``n`` that a feature has; ``B`` is 1.

    Raises:
        ValueError: there are more than 2**31 - 1 such bags.
    """
    starts = [0, *accumulate(table_rows)]
    bases = tuple(starts[table] if is_stepped[table] else -1 for table in table_of_feature)
    digits = _digits(launch.takes_gpu_forms(rows.device), table_rows)
    if launch.takes_gpu_forms(rows.device):
        bag_of = torch.empty(rows.numel(), dtype=torch.int32, device=rows.device)  # the kernel writes it
    else:
        bag_of = torch.repeat_interleave(_numbers(lengths.numel(), rows.device), lengths, output_size=rows.numel())
    if digits is None:
        keys, order = step_keys(rows, offsets, bases).sort(stable=True)
    else:
        keys, order = _sorted_by_digits(rows, offsets, bases, digits, bag_of)
    scales = None if per_sample_weights is None else per_sample_weights.index_select(0, order)
    bags = bag_of.index_select(0, order)
    if unpooled:
        ids = rows.numel()
        if ids * len(table_of_feature) > _MOST_BAGS:
            raise ValueError(
                f"a fused step without pooling takes at most {_MOST_BAGS:,} ids times features, not {ids:,} times "
                f"{len(table_of_feature):,}; make the batch smaller"
            )
        bags = torch.add(order.to(torch.int32), bags, alpha=ids)
    return StepOrder(keys, bags, scales)


class _Digits(NamedTuple):
    """How keys are cut."""

    bits: int
    low: torch.dtype
    high: torch.dtype | None = None  # of what is above these bits, if there is anything


def _digits(on_gpu: bool, table_rows: Sequence[int]) -> _Digits | None:
    """The fewest bits to sort by; None: int64."""
    count = sum(table_rows)
    if not on_gpu:
        high = torch.float32 if count > 1 << 24 else None  # float32 holds all integers up to this one
        return None if max(table_rows) >= _ROWS else _Digits(24, torch.float32, high)
    if count < 1 << 31:  # the kernels look for the key after the last one
        return _Digits(15, torch.int16) if count < 1 << 15 else _Digits(31, torch.int32)
    return _Digits(31, torch.int32, torch.int8 if count <= 1 << 38 else torch.int16)


def _sorted_by_digits(
    rows: Tensor, offsets: Tensor, bases: tuple[int, ...], digits: _Digits, bag_of: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sorted keys, and where they were."""
    from recfx.kernels.step.step_order_triton import recfx_step_digits, recfx_step_digits_on_gpu

    count, on_gpu = rows.numel(), launch.takes_gpu_forms(rows.device)
    low = torch.empty(count, dtype=digits.low, device=rows.device)
    high = torch.empty_like(low, dtype=digits.high) if digits.high or not on_gpu else low
    arguments = (rows, offsets, launch.numbers_on(rows.device, bases), low, high)
    sizes = (count, len(bases), (offsets.numel() - 1) // len(bases))
    if on_gpu:
        launch.launch(
            recfx_step_digits_on_gpu, -(-count // _LANES), *arguments, bag_of, *sizes,
            BITS=digits.bits, WIDE=digits.high is not None, BLOCK=_LANES,
        )  # fmt: skip
    else:
        lines = -(-count // _LINE)
        programs = launch.programs(rows.device, lines)
        launch.launch(recfx_step_digits, programs, *arguments, *sizes, -(-lines // programs) * _LINE)
    keys, order = low.sort(stable=True)
    if digits.high is None:
        return keys if on_gpu else keys.to(torch.int64), order
    high, again = high.index_select(0, order).sort(stable=True)
    keys = torch.add(keys.index_select(0, again).to(torch.int64), high.to(torch.int64), alpha=1 << digits.bits)
    return keys, order.index_select(0, again)


def step_keys(rows: Tensor, offsets: Tensor, bases: Sequence[int]) -> Tensor:
    """The key of each position in ATen, int64 ``[n]``; ``bases``: that of row 0 per feature, -1 if it is not stepped.

    Sorting these takes long on NPUs.
    """
    batch_size = (offsets.numel() - 1) // len(bases)
    counts = offsets[::batch_size].diff()
    base = torch.repeat_interleave(launch.numbers_on(rows.device, tuple(bases)), counts, output_size=rows.numel())
    return torch.where((rows >= 0) & (base >= 0), base + rows, -1)


@lru_cache(maxsize=_KEPT)
def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)
