"""Slot tables in ATen: the map from id to row of an index that is only read. Reference of ``csrc/index/slot_table.h``.

``slots`` is int64 ``[slots, 2]`` of (id, row), with a power of two of slots, and ``(-1, -1)`` in empty ones. Probing is
linear, from ``murmur3_finalizer(id) % slots``. Hash, probing and layout are those of FBGEMM's
``pruned_hashmap_lookup``, which can therefore read the table; exported files and copies on devices have it. Since id
-1 marks an empty slot, the row of that id is kept outside the table, in ``side_row`` int64 ``[1]`` (-1: none). At least
one slot is always empty; otherwise probing for an absent id would not end.
"""

import torch
from torch import Tensor

from recfx.kernels.index.mix64 import shifted_right


def slot_count(rows: int) -> int:
    """The number of slots: the power of two for which the table is between 3/8 and 3/4 full when no row is free."""
    needed = rows + rows // 3 + 1
    return 1 << (needed - 1).bit_length() if needed > 1 else 2


def slot_hash(ids: Tensor) -> Tensor:
    """murmur3's 64-bit finalizer, as int64."""
    k = (ids ^ shifted_right(ids, 33)) * -49064778989728563  # 0xff51afd7ed558ccd
    k = (k ^ shifted_right(k, 33)) * -4265267296055464877  # 0xc4ceb9fe1a85ec53
    return k ^ shifted_right(k, 33)


def home_slots(ids: Tensor, slots: int) -> Tensor:
    """The slot at which probing for each id begins: its hash modulo ``slots`` (a power of two)."""
    return slot_hash(ids) & (slots - 1)


def find_in_slots(ids: Tensor, slots: Tensor, side_row: Tensor) -> Tensor:
    """The row of each id, -1 if it is absent: int64 ``[n]`` to int64 ``[n]``. Scriptable."""
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


def find_rows_in_slots(ids: Tensor, slots: Tensor, side_row: Tensor, dense_rows: int, dense_begin: int = 0) -> Tensor:
    """``find_in_slots``, but the ids from ``dense_begin`` on are the rows before ``dense_rows``."""
    is_dense = (ids >= dense_begin) & (ids < dense_begin + dense_rows)
    return torch.where(is_dense, ids - dense_begin, find_in_slots(ids, slots, side_row))


def insert_into_slots(ids: Tensor, rows: Tensor, slots: Tensor, side_row: Tensor) -> None:
    """Insert ids, which must be distinct, with their rows into an empty table.

    The time does not depend on which ids they are. One after the other, ids that were chosen to have the same home
    would take a time that is quadratic in their number.
    """
    count = slots.size(0)
    beside = rows[ids == -1]
    if beside.numel() > 0:
        side_row.copy_(beside)
    inside = torch.nonzero(ids != -1).squeeze(1)
    home = home_slots(ids[inside], count)
    # No id goes past the slot before which there are the fewest ids for the slots, so counting begins there.
    places = torch.arange(count, device=ids.device)
    counts = torch.bincount(home, minlength=count)
    first = (counts.cumsum(0) - counts - places).argmin()
    home, order = torch.sort((home - first) & (count - 1), stable=True)
    # Each id is in its home, or after the id before it.
    place = places[: home.numel()]
    position = (place + (home - place).cummax(0).values + first) & (count - 1)
    slots[position] = torch.stack([ids[inside[order]], rows[inside[order]]], dim=1)
