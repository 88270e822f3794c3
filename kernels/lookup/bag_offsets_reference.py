"""``bag_offsets.py`` in ATen, on any device: nothing waits for the device but the fault that the caller reads.

There is no kernel in Triton beside it: CUDA's backend and torch_npu register kernels of their own for ``cumsum``,
``index_select`` and ``searchsorted``, which it is made of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.lookup.bag_offsets import Fault


def bag_offsets(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor
) -> tuple[Tensor, Fault | None]:
    """Has the contract of the operator."""
    offsets, found = checked_offsets(values, bags, are_offsets, bags_per_key, rows_per_key)
    return offsets, Fault.of(found)


def checked_offsets(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor
) -> tuple[Tensor, Tensor]:
    """The offsets, and the fault as int64 ``[2]`` (zeros if there is none). Scriptable."""
    negative_length, wrong_total, out_of_range = 1, 2, 3  # TorchScript sees no globals
    device, ids = values.device, values.numel()
    if len(bags_per_key) == 1:
        bags_per_key = bags_per_key * rows_per_key.numel()
    count = bags.numel() - int(are_offsets)
    if len(bags_per_key) != rows_per_key.numel() or sum(bags_per_key) != count or min(bags_per_key) < 0:
        raise RuntimeError("recfx::bag_offsets: bags_per_key must have an entry per key, and add up to the bags")
    lengths = bags.to(torch.int64)
    negative = lengths < 0
    if are_offsets:
        begin, end = lengths[:-1], lengths[1:]
        negative, lengths = end < begin, end - begin
        lengths = torch.where((lengths < 0) & ~negative, torch.full_like(lengths, ids + 1), lengths)  # it overflowed
    # Any length above the number of ids is equally wrong, so lengths are clamped there and their sums do not overflow.
    ends = lengths.clamp(0, ids + 1).cumsum(0)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    offsets = torch.cat([zero, ends])
    bag = _first(negative | (ends > ids), zero)
    is_wrong = (bag < count) | (offsets[-1:] != ids)
    is_negative = torch.cat([negative, zero > 0]).index_select(0, bag)
    kind = torch.where(is_negative, zero + negative_length, zero + wrong_total)
    # Which key an id belongs to. If the lengths are wrong, no one asks whether the ids are rows.
    last_bags = torch.tensor(bags_per_key, dtype=torch.int64, device=device).cumsum(0)
    positions = torch.arange(ids, dtype=torch.int64, device=device)
    keys = torch.searchsorted(offsets.index_select(0, last_bags), positions, right=True)
    rows = rows_per_key.to(device).index_select(0, keys.clamp(max=rows_per_key.numel() - 1))
    bad = _first((rows >= 0) & ((values < 0) | (values >= rows)), zero)
    is_bad = bad < ids
    kind = torch.where(is_wrong, kind, torch.where(is_bad, zero + out_of_range, zero))
    position = torch.where(is_wrong, bag, torch.where(is_bad, bad, zero))
    return offsets, torch.cat([kind, position])


def _first(mask: Tensor, zero: Tensor) -> Tensor:
    """The position of the first True as int64 ``[1]``; the length of ``mask`` if there is none."""
    count = mask.numel()
    positions = torch.arange(count, dtype=torch.int64, device=mask.device)
    return torch.cat([torch.where(mask, positions, zero + count), zero + count]).min().view(1)
