"""The order in which a fused step takes the positions of a batch: by row, and where rows are equal, as in the batch.

So the gradients of a row are summed in the order of the batch, whatever the device. Positions are sorted by keys of
float32, which Ascend's AI Cores sort; int64 would go to its AI CPU, twenty times as slow. 24 bits fit, so there are two
stable passes if the tables have more rows together than that, and int64 has to do if one table has 2**31.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import launch

_DIGIT = 1 << 24  # float32 holds all integers below
_LINE = 16  # float32 values of one cache line, into which one program writes
_ROWS = 2**31  # rows are int32 in the kernel
_MOST_BAGS = 2**31 - 1  # likewise
_KEPT = 256


class StepOrder(NamedTuple):
    """The positions of a batch, ordered."""

    keys: Tensor  # int64 [n], ascending: the row, counted through all tables; -1: of no row
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
    bag_of = torch.repeat_interleave(_numbers(lengths.numel(), rows.device), lengths, output_size=rows.numel())
    if max(table_rows) >= _ROWS:
        keys, order = step_keys(rows, offsets, bases).sort(stable=True)
    else:
        keys, order = _sorted_by_digits(rows, offsets, bases, starts[-1] > _DIGIT)
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


def _sorted_by_digits(rows: Tensor, offsets: Tensor, bases: tuple[int, ...], is_wide: bool) -> tuple[Tensor, Tensor]:
    """The sorted keys, and where they were. ``is_wide``: some keys have more than one digit."""
    from recfx.kernels.step.step_order_triton import recfx_step_digits

    low = torch.empty(rows.numel(), dtype=torch.float32, device=rows.device)
    high = torch.empty_like(low)
    lines = -(-rows.numel() // _LINE)
    programs = launch.programs(rows.device, lines)
    launch.launch(
        recfx_step_digits, programs, rows, offsets, launch.numbers_on(rows.device, bases), low, high,
        rows.numel(), len(bases), (offsets.numel() - 1) // len(bases), -(-lines // programs) * _LINE,
    )  # fmt: skip
    keys, order = low.sort(stable=True)
    if not is_wide:
        return keys.to(torch.int64), order
    high, again = high.index_select(0, order).sort(stable=True)
    keys = torch.add(keys.index_select(0, again).to(torch.int64), high.to(torch.int64), alpha=_DIGIT)
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
