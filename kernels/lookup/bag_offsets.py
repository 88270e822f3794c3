"""Where the bags of a batch begin, and whether its lengths and ids are valid, in one pass over the batch.

``recfx::bag_offsets`` runs in C++ on the CPU (``csrc/lookup/bag_offsets.cpp``) and in ATen everywhere else. Where
kernels in Triton can be launched, ``recfx::bag_offsets_triton`` (``bag_offsets_triton.py``) does the same for batches
that are right, and the reference in ATen is asked about others. Nothing waits for the device but what the caller reads.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import launch, library
from recfx.kernels.build.plain_arguments import triton_operator
from recfx.kernels.route.from_zero import from_zero

# The kinds of fault. csrc/lookup/bag_offsets.cpp has the same numbers.
NOTHING, NEGATIVE_LENGTH, WRONG_TOTAL, OUT_OF_RANGE = range(4)
LARGEST = 1 << 30
"""The kernel in Triton computes with numbers up to this one."""
_LINE = 16  # bags: programs write to different lines of the memory
_LANES = 512  # bags or ids that the kernel reads at once


class Fault(NamedTuple):
    """The first thing that is wrong with a batch."""

    # ``NEGATIVE_LENGTH``, ``WRONG_TOTAL`` (the lengths do not add up to the number of ids) or ``OUT_OF_RANGE`` (an id
    # is not a row of its table)
    kind: int
    # For a fault in the lengths, the bag that has the negative length or that runs past the last id (the number of bags
    # if ids are left over); for an id out of range, its position in the values
    position: int


class BagOffsets(NamedTuple):
    """Where bags begin."""

    offsets: Tensor  # int64 ``[bags + 1]``, from 0 to ``n``; meaningless if there is a fault in the lengths
    fault: Fault | None  # the first fault, or None
    # Where the ids of each key begin, and where those of the last end; None if the host has not learned it
    borders: list[int] | None


def bag_offsets(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor
) -> BagOffsets:
    """Compute and check the offsets of all bags. No sum overflows, whatever the lengths are.

    Args:
        values: int64 or int32 ``[n]``, the ids of all keys, one key after the other.
        bags: int64 or int32; lengths ``[bags]``, or offsets ``[bags + 1]``, which need not begin at 0.
        are_offsets: whether ``bags`` are offsets.
        bags_per_key: how many bags each of the ``F`` keys has, or one number for all of them.
        rows_per_key: int64 ``[F]``, on the CPU: ids must be at least 0 and below this number; -1 leaves the key
            unchecked.

    Raises:
        RuntimeError: an argument has a different shape or dtype.
    """
    launched = _by_kernel(values, bags, are_offsets, bags_per_key, rows_per_key)
    if launched is not None:  # what is found may be wrong, and the reference says what; or numbers are too large
        said, keys = launched[1].tolist(), rows_per_key.numel()  # the host waits for the device
        if not any(said[keys + 1 :]):
            return BagOffsets(launched[0], None, said[: keys + 1])
    offsets, fault = library.operators().bag_offsets(values, bags, are_offsets, bags_per_key, rows_per_key)
    kind, position = fault.tolist()
    return BagOffsets(offsets, Fault(kind, position) if kind else None, None)


def masked_bags(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor, reads_all: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """``bag_offsets`` where the host does not wait for the device: offsets, ids, and int64 ``[]``, 1 if something is
    wrong and 0 if not. All offsets are 0 if it is, so that who looks up bags reads no id; or if ids are not read by bag
    (``reads_all``), they are all 0, and in the last bag. None where the host has to wait.
    """
    # The kernel takes offsets that begin far from 0 for wrong.
    launched = _by_kernel(values, bags - bags[0] if are_offsets else bags, are_offsets, bags_per_key, rows_per_key)
    if launched is None:
        return None
    wrong = launched[1][rows_per_key.numel() + 1 :].amax()
    kept = wrong - 1  # all bits, or none
    offsets = launched[0].bitwise_and(kept)
    if reads_all:
        offsets[-1:].fill_(values.numel())
        values = values.bitwise_and(kept)
    return offsets, values, wrong


def _by_kernel(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor
) -> tuple[Tensor, Tensor] | None:
    """What the kernel returns; None if there is none, or numbers are too large for it."""
    if values.device.type == "cpu" or not launch.is_possible(values.device):
        return None
    limits: list[int] = rows_per_key.tolist()
    counts = bags_per_key * len(limits) if len(bags_per_key) == 1 else bags_per_key
    fit = len(counts) == len(limits) and min(counts) >= 0 and sum(counts) == bags.numel() - are_offsets
    if not fit or sum(counts) == 0 or max(values.numel(), *limits) > LARGEST:
        return None
    return bag_offsets_triton(values.contiguous(), bags.contiguous(), are_offsets, counts, limits)


@triton_operator("recfx::bag_offsets_triton")
def bag_offsets_triton(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: list[int]
) -> tuple[Tensor, Tensor]:
    """The kernel's offsets; and int64 ``[F + 1 + any number]``, which is ``borders`` and, for faults, some ones.

    There is one number of bags per key, and at least one bag. No number is larger than ``LARGEST``.
    """
    from recfx.kernels.lookup.bag_offsets_triton import recfx_bag_offsets

    device, count, ids = values.device, sum(bags_per_key), values.numel()
    first_bags = launch.numbers_on(device, (0, *accumulate(bags_per_key)))
    limits = launch.numbers_on(device, tuple(rows_per_key))
    # Sums may wrap around; what is larger than the number of ids before they do is a fault.
    ends = bags if are_offsets else bags.cumsum(0, dtype=torch.int32)
    programs = _programs(device, max(count, ids))
    offsets = torch.empty(count + 1, dtype=torch.int64, device=device)
    reports = torch.empty(len(bags_per_key) + 1 + programs, dtype=torch.int64, device=device)
    bags_each, ids_each = (-(-number // (programs * _LINE)) * _LINE for number in (count, ids))
    launch.launch(
        recfx_bag_offsets, programs, bags, ends, values, first_bags, limits, offsets, reports,
        count, ids, len(bags_per_key), bags_each, ids_each, ARE_OFFSETS=are_offsets,
    )  # fmt: skip
    return offsets, reports


def _programs(device: torch.device, most: int) -> int:
    return launch.programs(device, -(-most // _LANES), "recfx_bag_offsets")


@bag_offsets_triton.register_fake
def _(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: list[int]
) -> tuple[Tensor, Tensor]:
    count = sum(bags_per_key)
    reports = len(bags_per_key) + 1 + _programs(values.device, max(count, values.shape[0]))
    return bags.new_empty(count + 1, dtype=torch.int64), bags.new_empty(reports, dtype=torch.int64)


def kernel_reference(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: list[int]
) -> tuple[Tensor, Tensor]:
    """``bag_offsets_triton`` in ATen, on any device."""
    limits = torch.tensor(rows_per_key)
    offsets, fault = bag_offsets_reference(values, bags, are_offsets, bags_per_key, limits)
    first_bags = launch.numbers_on(values.device, (0, *accumulate(bags_per_key)))
    return offsets, torch.cat([offsets.index_select(0, first_bags), fault[:1].clamp(max=1)])


@library.fake("bag_offsets")
def _fake(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor
) -> tuple[Tensor, Tensor]:
    count = bags.shape[0] - int(are_offsets)
    return rows_per_key.new_empty(count + 1), rows_per_key.new_empty(2)


@library.reference("bag_offsets")
def bag_offsets_reference(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor
) -> tuple[Tensor, Tensor]:
    """The operator in ATen: the offsets, and the fault as int64 ``[2]`` (zeros if there is none). Scriptable."""
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
    # Any length above the number of ids is equally wrong, so lengths are clamped there, and the first sum that is wrong
    # does not overflow. Those behind it do not matter.
    offsets = from_zero(lengths.clamp(0, ids + 1), 2 * ids + 1)
    zero = offsets[:1]
    bag = _first(negative | (offsets[1:] > ids), zero)
    is_wrong = (bag < count) | (offsets[-1:] != ids)
    is_negative = torch.cat([negative, zero > 0]).index_select(0, bag)
    kind = torch.where(is_negative, zero + negative_length, zero + wrong_total)
    # Below what each id must be. If the lengths are wrong, no one asks whether ids are rows: the first key gets all.
    keys = len(bags_per_key)
    borders = [0]
    for bags_of_key in bags_per_key:
        borders.append(borders[-1] + bags_of_key)
    numbers = torch.tensor(borders + [ids] + [0] * (keys - 1), dtype=torch.int64, device=device)
    ids_per_key = torch.where(is_wrong, numbers[keys + 1 :], offsets.index_select(0, numbers[: keys + 1]).diff())
    rows = torch.repeat_interleave(rows_per_key.to(device), ids_per_key, output_size=ids)
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
