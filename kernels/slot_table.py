"""The slot table in ATen: an open-addressed map from id to row. Reference of ``csrc/slot_table.h``.

``slots`` is int64 ``[slots, 2]`` of (id, row), a power of two of them, ``(-1, -1)`` where empty. Linear probing from
``murmur3_finalizer(id) % slots``. Hash, probing and layout equal FBGEMM's ``pruned_hashmap_lookup``, which can serve
it therefore. Id -1 means empty there, so its row is kept beside the table, in ``side_row`` int64 ``[1]`` (-1: none).
At least one slot is always empty, or probing for an absent id would not end.
"""

from __future__ import annotations

import torch
from torch import Tensor


def slot_count(rows: int) -> int:
    """Slots for so many rows: the power of two that keeps the table between 3/8 and 3/4 full when no row is free.

    That is at most 2.67 slots a row, 43 bytes; with the row-aligned state an index stays below 64 bytes a row.
    """
    needed = rows + rows // 3 + 1
    return 1 << (needed - 1).bit_length() if needed > 1 else 2


def home_slots(ids: Tensor, slots: int) -> Tensor:
    """Where probing for each id begins: murmur3's 64-bit finalizer, modulo ``slots`` (a power of two)."""
    k = (ids ^ ((ids >> 33) & 0x7FFFFFFF)) * -49064778989728563  # 0xff51afd7ed558ccd
    k = (k ^ ((k >> 33) & 0x7FFFFFFF)) * -4265267296055464877  # 0xc4ceb9fe1a85ec53
    return (k ^ ((k >> 33) & 0x7FFFFFFF)) & (slots - 1)


def find_in_slots(ids: Tensor, slots: Tensor, side_row: Tensor) -> Tensor:
    """The row of each id, -1 where absent. int64 ``[n]`` to int64 ``[n]``. Scriptable."""
    mask = slots.size(0) - 1
    position = home_slots(ids, slots.size(0))
    rows = torch.where(ids == -1, side_row, torch.full_like(ids, -1))
    pending = torch.nonzero(ids != -1).squeeze(1)
    while pending.numel() > 0:
        here = slots[position[pending]]
        rows[pending] = torch.where(here[:, 0] == ids[pending], here[:, 1], rows[pending])
        pending = pending[(here[:, 0] != -1) & (here[:, 0] != ids[pending])]
        position[pending] = (position[pending] + 1) & mask
    return rows


def insert_into_slots(ids: Tensor, rows: Tensor, slots: Tensor, side_row: Tensor) -> None:
    """Insert ids, all different and all absent, with their rows."""
    mask = slots.size(0) - 1
    beside = rows[ids == -1]
    if beside.numel() > 0:
        side_row.copy_(beside)
    pending = torch.nonzero(ids != -1).squeeze(1)
    position = home_slots(ids, slots.size(0))
    while pending.numel() > 0:
        # Several ids may want one empty slot: each writes its number there, and whoever's number is left has it.
        claims = pending[slots[position[pending], 0] == -1]
        slots[position[claims], 1] = claims
        winners = claims[slots[position[claims], 1] == claims]
        slots[position[winners]] = torch.stack([ids[winners], rows[winners]], dim=1)
        pending = pending[slots[position[pending], 0] != ids[pending]]
        position[pending] = (position[pending] + 1) & mask


def erase_from_slots(id_: int, slots: Tensor, side_row: Tensor) -> int:
    """Erase one id; the row that it had, or -1. What follows in its run moves back over the hole: no tombstones."""
    if id_ == -1:
        row = int(side_row.item())
        side_row.fill_(-1)
        return row
    count = slots.size(0)

    def home(value: int) -> int:
        return int(home_slots(slots.new_tensor([value]), count).item())

    hole = home(id_)
    while (found := int(slots[hole, 0])) != id_:
        if found == -1:
            return -1
        hole = (hole + 1) % count
    row = int(slots[hole, 1])
    following = (hole + 1) % count
    while (other := int(slots[following, 0])) != -1:
        # An id may move back to the hole unless that would put it before its home.
        if (following - home(other)) % count >= (following - hole) % count:
            slots[hole] = slots[following]
            hole = following
        following = (following + 1) % count
    slots[hole] = -1
    return row


def longest_probe(slots: Tensor) -> int:
    """The most slots that a lookup of an id in the table looks at; 0 if it is empty. Reads it piece by piece."""
    count, longest, piece = slots.size(0), 0, 2**20
    for begin in range(0, count, piece):
        ids = slots[begin : begin + piece, 0]
        places = torch.nonzero(ids != -1).squeeze(1)
        if places.numel() > 0:
            distance = (begin + places - home_slots(ids[places], count)) & (count - 1)
            longest = max(longest, int(distance.max()) + 1)
    return longest
