"""Slot groups, the map from id to row of an index that changes: their layout, which ``csrc/index/slot_groups.h`` fills.

``slot_groups`` is int64 ``[groups, 8]``: each group is one cache line of four slots, their ids first and then their
rows, filled from the first one on, and -1 where a slot is empty. An id's home is the group at
``seeded_hash(id, seed) / 2**64`` of all groups. If that is full, the id is in the next group that was not full when it
came, so the search for an id ends at the first group that is not full. Since id -1 marks an empty slot, the row of that
id is kept outside the groups, in ``side_row`` int64 ``[2]``: its row (-1: none), and the seed of the hash.

Each index draws a seed of its own (``index_buffers.choose_seeds``). Whoever chooses ids without knowing it cannot make
many of them have the same home, which would make every search for them long. Which row an id has does not depend on it.
"""

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
    """The hash of each id, as int64; its lower half is no good. ``seed``: int64 ``[1]``."""
    factor = mix64(seed + 1) | 1
    k = ids ^ mix64(seed)
    k = (k ^ ((k >> 33) & 0x7FFFFFFF)) * -49064778989728563  # 0xff51afd7ed558ccd
    return (k ^ ((k >> 33) & 0x7FFFFFFF)) * factor


def home_groups(ids: Tensor, groups: int, side_row: Tensor) -> Tensor:
    """The group at which the search for each id begins."""
    return (((seeded_hash(ids, side_row[1:]) >> 32) & 0xFFFFFFFF) * groups) >> 32


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
