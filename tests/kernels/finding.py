"""Indexes of several kinds, filled, and their copies as operators that find rows take them."""

from collections.abc import Sequence
from typing import Any

import torch

from recfx.hashing import HashConfig, HashIndex
from recfx.ir.tables import TableSpec
from recfx.kernels.index.find_rows import ReadIndexes
from recfx.runtime.find_rows import IndexCopies

EXTREMES = [0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63)]
TABLES: list[dict[str, Any]] = [
    {},
    {"dense_rows": 7},
    {"dense_rows": 7, "unseen": "share", "buckets": 3, "seed": 2**63 - 2},
    {"unseen": "share", "seed": -(2**63)},
    {"dense_rows": 7, "unseen": "row", "buckets": 3},
]


def filled(number: int) -> HashIndex:
    """An index of ``TABLES`` with some ids, among them those of ``EXTREMES``."""
    index = HashIndex(60, config=HashConfig(on_full="share", **TABLES[number]), name=f"t{number}")
    index.insert(torch.cat([torch.tensor(EXTREMES), torch.arange(5, 25) * 10**12]))
    index.erase(torch.tensor([2**31, 7 * 10**12]))
    return index


def copies_of(indexes: Sequence[HashIndex | None]) -> ReadIndexes:
    """Copies on the CPU; each table has one feature."""
    tables = tuple(_table(number) for number in range(len(indexes)))
    return IndexCopies(tables, lambda: indexes).on(torch.device("cpu")).indexes


def _table(number: int) -> TableSpec:
    feature = (f"f{number}",)
    return TableSpec(f"t{number}", feature, feature, 60, 4, "SUM", HashConfig().resolve(60, adopt=True), 0.0, 0.0)
