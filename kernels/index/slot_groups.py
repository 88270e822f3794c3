"""Slot groups in ATen: the map from id to row of an index that changes. Reference of ``csrc/index/slot_groups.h``.

``slot_groups`` is int64 ``[groups, 8]``: each group is one cache line of four slots, their ids first and then their
rows, filled from the first one on, and -1 where a slot is empty. An id's home is the group at
``seeded_hash(id, seed) / 2**64`` of all groups. If that is full, the id is in the next group that was not full when it
came, so the search for an id ends at the first group that is not full. Since id -1 marks an empty slot, the row of that
id is kept outside the groups, in ``side_row`` int64 ``[2]``: its row (-1: none), and the seed of the hash.

Each index draws a seed of its own (``index_buffers.choose_seeds``). Whoever chooses ids without knowing it cannot make
many of them have the same home, which would make every search for them long. Which row an id has does not depend on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.index.mix64 import mix64

SLOTS = 4
"""How many slots a group has."""


def group_count(rows: int) -> int:
    """The number of groups: 4 of 9 slots have an id when no row is free, which takes 36 bytes per row.

    Then 97 % of the ids are in their home group, and an index stays below 64 bytes per row.
    """
    return (9 * rows + 15) // 16 + 1


def seeded_hash(ids: Tensor, seed: Tensor) -> Tensor:
    """The hash of each id, as int64; its lower half is no good. ``seed``: int64 ``[1]``. Scriptable."""
    factor = mix64(seed + 1) | 1
    k = ids ^ mix64(seed)
    k = (k ^ ((k >> 33) & 0x7FFFFFFF)) * -49064778989728563  # 0xff51afd7ed558ccd
    return (k ^ ((k >> 33) & 0x7FFFFFFF)) * factor


def home_groups(ids: Tensor, groups: int, side_row: Tensor) -> Tensor:
    """The group at which the search for each id begins."""
    return (((seeded_hash(ids, side_row[1:]) >> 32) & 0xFFFFFFFF) * groups) >> 32


def find_in_groups(ids: Tensor, slot_groups: Tensor, side_row: Tensor) -> Tensor:
    """The row of each id, -1 if it is absent: int64 ``[n]`` to int64 ``[n]``. Scriptable."""
    count = slot_groups.size(0)
    group = home_groups(ids, count, side_row)
    rows = torch.where(ids == -1, side_row[:1], torch.full_like(ids, -1))
    pending = torch.nonzero(ids != -1).squeeze(1)
    while pending.numel() > 0:
        here = slot_groups[group[pending]]
        same = here[:, :4] == ids[pending].unsqueeze(1)
        rows[pending] = torch.where(same, here[:, 4:], torch.full_like(here[:, 4:], -1)).amax(1)
        pending = pending[~same.any(1) & (here[:, 3] != -1)]
        group[pending] = (group[pending] + 1) % count
    return rows


def insert_into_groups(ids: Tensor, rows: Tensor, slot_groups: Tensor, side_row: Tensor) -> None:
    """Insert ids, which must be distinct and absent, with their rows."""
    beside = rows[ids == -1]
    if beside.numel() > 0:
        side_row[:1].copy_(beside)
    pending = torch.nonzero(ids != -1).squeeze(1)
    group = home_groups(ids, slot_groups.size(0), side_row)
    while pending.numel() > 0:
        # Several ids may want the same empty slot: each writes its number there, and the one whose number remains gets
        # it.
        size = (slot_groups[group[pending], :SLOTS] != -1).sum(1)
        claims, slot = pending[size < SLOTS], size[size < SLOTS]
        slot_groups[group[claims], SLOTS + slot] = claims
        won = slot_groups[group[claims], SLOTS + slot] == claims
        winners, slot = claims[won], slot[won]
        slot_groups[group[winners], slot] = ids[winners]
        slot_groups[group[winners], SLOTS + slot] = rows[winners]
        placed = (slot_groups[group[pending], :SLOTS] == ids[pending].unsqueeze(1)).any(1)
        pending = pending[~placed]
        full = slot_groups[group[pending], SLOTS - 1] != -1
        group[pending] = torch.where(full, (group[pending] + 1) % slot_groups.size(0), group[pending])


def erase_from_groups(id_: int, slot_groups: Tensor, side_row: Tensor) -> int:
    """Erase one id and return its row, or -1. An id that passed the place takes it: there are no tombstones."""
    if id_ == -1:
        row = int(side_row[0])
        side_row[0] = -1
        return row
    count = slot_groups.size(0)

    def home(value: int) -> int:
        return int(home_groups(slot_groups.new_tensor([value]), count, side_row).item())

    def ids_of(number: int) -> list[int]:
        return [value for value in slot_groups[number, :SLOTS].tolist() if value != -1]

    def passed(full: int) -> tuple[int, int] | None:
        """The first id after a full group whose home is that group or an earlier one."""
        number = full
        while True:
            number = (number + 1) % count
            for slot, other in enumerate(ids_of(number)):
                if (number - home(other)) % count >= (number - full) % count:
                    return number, slot
            if len(ids_of(number)) < SLOTS:
                return None

    group = home(id_)
    while id_ not in ids_of(group):
        if len(ids_of(group)) < SLOTS:
            return -1
        group = (group + 1) % count
    slot = ids_of(group).index(id_)
    row = int(slot_groups[group, SLOTS + slot])
    while len(ids_of(group)) == SLOTS and (later := passed(group)) is not None:
        _copy_slot(slot_groups, later, (group, slot))
        group, slot = later
    last = len(ids_of(group)) - 1
    _copy_slot(slot_groups, (group, last), (group, slot))
    slot_groups[group, last] = slot_groups[group, SLOTS + last] = -1
    return row


def _copy_slot(slot_groups: Tensor, source: tuple[int, int], target: tuple[int, int]) -> None:
    for part in (0, SLOTS):
        slot_groups[target[0], part + target[1]] = slot_groups[source[0], part + source[1]].clone()


def longest_probe(slot_groups: Tensor, side_row: Tensor, begin: int = 0, end: int | None = None) -> int:
    """The most groups that finding an id of these groups reads; 0 if there is none. Reads them in pieces."""
    count, longest, piece = slot_groups.size(0), 0, 2**18
    end = count if end is None else end
    for first in range(begin, end, piece):
        ids = slot_groups[first : min(first + piece, end), :SLOTS]
        places = torch.nonzero(ids != -1)
        if places.numel() > 0:
            home = home_groups(ids[places[:, 0], places[:, 1]], count, side_row)
            longest = max(longest, int(((first + places[:, 0] - home) % count).max()) + 1)
    return longest
