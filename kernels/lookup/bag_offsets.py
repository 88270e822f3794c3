"""Where the bags of a batch begin, and whether its lengths and ids are valid, in one pass over the batch.

``bag_offsets`` calls the C++ operator for the CPU (``csrc/lookup/bag_offsets.cpp``); ``library.load()`` must have been
called first. ``bag_offsets_reference.py`` implements the same contract.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import library

# The kinds of fault. csrc/lookup/bag_offsets.cpp has the same numbers.
NOTHING, NEGATIVE_LENGTH, WRONG_TOTAL, OUT_OF_RANGE = range(4)


class Fault(NamedTuple):
    """The first thing that is wrong with a batch.

    Args:
        kind: ``NEGATIVE_LENGTH``, ``WRONG_TOTAL`` (the lengths do not add up to the number of ids) or ``OUT_OF_RANGE``
            (an id is not a row of its table).
        position: for a fault in the lengths, the bag that has the negative length or that runs past the last id (the
            number of bags if ids are left over); for an id out of range, its position in the values.
    """

    kind: int
    position: int

    @classmethod
    def of(cls, found: Tensor) -> Fault | None:
        """Read the int64 ``[2]`` that the operators return; zeros mean that there is no fault."""
        kind, position = found.tolist()
        return cls(kind, position) if kind else None


def bag_offsets(
    values: Tensor, bags: Tensor, are_offsets: bool, bags_per_key: list[int], rows_per_key: Tensor
) -> tuple[Tensor, Fault | None]:
    """Compute and check the offsets of all bags. No sum overflows, whatever the lengths are.

    Args:
        values: int64 or int32 ``[n]``, the ids of all keys, one key after the other.
        bags: int64 or int32; lengths ``[bags]``, or offsets ``[bags + 1]``, which need not begin at 0.
        are_offsets: whether ``bags`` are offsets.
        bags_per_key: how many bags each of the ``F`` keys has, or one number for all of them.
        rows_per_key: int64 ``[F]``: ids must be at least 0 and below this number; -1 leaves the key unchecked.

    Returns:
        offsets: int64 ``[bags + 1]``, from 0 to ``n``; meaningless if there is a fault in the lengths.
        fault: the first fault, or None.

    Raises:
        RuntimeError: an argument has a different shape or dtype.
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
