"""``bag_offsets.py`` in ATen, on any device.

There is no kernel in Triton beside it: CUDA's backend and torch_npu register kernels of their own for ``cumsum``,
``index_select`` and ``repeat_interleave``, which offsets are made of, and permutes of bags (``recfx/nodes/bags.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .bag_offsets import Fault


def bag_offsets(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor
) -> tuple[Tensor, Fault | None]:
    """The same contract as the operator."""
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
    offsets = torch.zeros(count + 1, dtype=torch.int64, device=device)
    offsets[1:] = lengths.clamp(0, ids + 1).cumsum(0)
    wrong = torch.nonzero(negative | (offsets[1:] > ids)).squeeze(1)
    if wrong.numel() > 0 or int(offsets[-1]) != ids:
        position = int(wrong[0]) if wrong.numel() > 0 else count
        kind = negative_length if wrong.numel() > 0 and bool(negative[position]) else wrong_total
        return torch.zeros_like(offsets), torch.tensor([kind, position], dtype=torch.int64, device=device)
    first_bag = torch.tensor(bags_per_key, dtype=torch.int64, device=device).cumsum(0)
    key_ends = offsets.index_select(0, first_bag)
    key_lengths = torch.diff(torch.cat([torch.zeros_like(key_ends[:1]), key_ends]))
    rows = torch.repeat_interleave(rows_per_key.to(device), key_lengths)
    bad = torch.nonzero((rows >= 0) & ((values < 0) | (values >= rows))).squeeze(1)
    fault = torch.zeros(2, dtype=torch.int64, device=device)
    if bad.numel() > 0:
        fault[0], fault[1] = out_of_range, bad[0]
    return offsets, fault
