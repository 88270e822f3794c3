"""The set of free rows as a tree of bits, in one int64 tensor. Reference of ``csrc/index/free_rows.h``.

Level 0 has one bit per row (row ``r`` is bit ``r % 64`` of word ``r // 64``). Each further level has one bit per word
of the level below, which is set if that word is not zero; the last level is a single word. The levels are stored one
after the other. The tree lets the C++ operators find the lowest free row of a bucket in a few steps, however often rows
were taken and given back. The references read ``row_state`` instead and only keep the tree up to date.
"""

from __future__ import annotations

import torch
from torch import Tensor


def level_sizes(rows: int) -> list[int]:
    """The number of words in each level, lowest level first."""
    sizes = [(rows + 63) // 64]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 63) // 64)
    return sizes


def word_count(rows: int) -> int:
    """The number of words in the whole tree."""
    return sum(level_sizes(rows))


def update_free_rows(free_rows: Tensor, row_state: Tensor, changed: Tensor, dense_rows: int) -> None:
    """Update the tree after ``row_state`` has changed in the rows ``changed`` (int64 ``[n]``, any order)."""
    words = torch.unique(changed // 64)
    bit = torch.arange(64, device=changed.device)
    rows = words.unsqueeze(1) * 64 + bit  # [words, 64]
    exists = (rows < row_state.numel()) & (rows >= dense_rows)
    is_set = exists & (row_state[rows.clamp(max=row_state.numel() - 1)] % 2 == 0)
    start = 0
    for size in level_sizes(row_state.numel()):
        free_rows[start + words] = (is_set.long() << bit).sum(dim=1)
        words = torch.unique(words // 64)
        children = words.unsqueeze(1) * 64 + bit
        is_set = (children < size) & (free_rows[start + children.clamp(max=size - 1)] != 0)
        start += size
