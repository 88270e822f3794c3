"""Where the bags of a batch begin, and whether its lengths and ids are fit to be looked up: one pass over all of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import library

# What can be wrong; as in csrc/bag_offsets.cpp.
NOTHING, NEGATIVE_LENGTH, WRONG_TOTAL, OUT_OF_RANGE = range(4)


class Fault(NamedTuple):
    """The first thing that is wrong with a batch.

    Args:
        kind: ``NEGATIVE_LENGTH``, ``WRONG_TOTAL`` (lengths add up to another number than that of the ids) or
            ``OUT_OF_RANGE`` (an id is not one of its table's rows).
        position: the bag with the negative length, or with which the ids are used up (the number of bags, if some are
            left); of an id out of range, its place in the values.
    """

    kind: int
    position: int


def bag_offsets(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor
) -> tuple[Tensor, Fault | None]:
    """Offsets of all bags, checked. No sum overflows, whatever the lengths.

    Args:
        values: int64 or int32 ``[n]``, the ids of all keys one key after the other.
        bags: int64 or int32; lengths ``[bags]``, or offsets ``[bags + 1]``, which may begin anywhere.
        are_offsets: which of the two.
        bags_per_key: how many bags each of the ``F`` keys has, or one number that holds for all.
        rows_per_key: int64 ``[F]``: ids are at least 0 and below this; -1 leaves the key unchecked.

    Returns:
        offsets: int64 ``[bags + 1]``, from 0 to ``n``; without meaning if there is a fault in the lengths.
        fault: or None.

    Raises:
        RuntimeError: shapes or dtypes other than these.
    """
    if values.device.type == "cpu" and library.load():
        offsets, found = torch.ops.recfx.bag_offsets(values, bags, are_offsets, bags_per_key, rows_per_key)
    else:
        offsets, found = bag_offsets_reference(values, bags, are_offsets, bags_per_key, rows_per_key)
    kind, position = found.tolist()
    return offsets, Fault(kind, position) if kind else None


def bag_offsets_reference(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor
) -> tuple[Tensor, Tensor]:
    """``bag_offsets`` in ATen, on any device; the fault as int64 ``[2]``, zeros if there is none. Scriptable."""
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
    # Longer than all ids is as wrong as twice as long; sums of these do not overflow.
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


@library.when_loaded
def _register_fakes() -> None:
    @torch.library.register_fake("recfx::bag_offsets")
    def _bag_offsets(
        values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor
    ) -> tuple[Tensor, Tensor]:
        count = bags.shape[0] - int(are_offsets)
        return rows_per_key.new_empty(count + 1), rows_per_key.new_empty(2)
