"""Where the bags of a batch begin, and whether its lengths and ids are fit to be looked up: one pass over all of it.

``bag_offsets`` calls the C++ operator (``csrc/bag_offsets.cpp``) on the CPU, which has to be loaded
(``library.load()``). The reference of the same contract is in ``bag_offsets_reference.py``.
"""

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

    @classmethod
    def of(cls, found: Tensor) -> Fault | None:
        """From the operators' int64 ``[2]``; zeros stand for none."""
        kind, position = found.tolist()
        return cls(kind, position) if kind else None


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
    offsets, found = torch.ops.recfx.bag_offsets(values, bags, are_offsets, bags_per_key, rows_per_key)
    return offsets, Fault.of(found)


@library.when_loaded
def _register_fakes() -> None:
    @torch.library.register_fake("recfx::bag_offsets")
    def _bag_offsets(
        values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor
    ) -> tuple[Tensor, Tensor]:
        count = bags.shape[0] - int(are_offsets)
        return rows_per_key.new_empty(count + 1), rows_per_key.new_empty(2)
