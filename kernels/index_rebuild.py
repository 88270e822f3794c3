"""What is derived of an index, made again from its state; and everything that can be wrong with a state.

``rebuild`` calls the C++ operator (``csrc/index_rebuild.cpp``), which has to be loaded (``library.load()``). The
reference of the same contract is in ``index_rebuild_reference.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import library
from .index_buffers import IndexBuffers, IndexPolicy

# What can be wrong with a row; the same numbers stand in csrc/index_rebuild.cpp.
NO_PROBLEM, UNKNOWN_STATE, DENSE_ROW, DENSE_ID, WRONG_BUCKET, DUPLICATE_ID, BAD_SCORE = range(7)


class Rebuilt(NamedTuple):
    """What ``rebuild`` found.

    Args:
        problem: ``NO_PROBLEM`` or another of these numbers.
        row: the lowest row (or place of a candidate) that has it; -1 without one.
        is_candidate: whether ``row`` is the place of a candidate for admission.
    """

    problem: int
    row: int
    is_candidate: bool


def rebuild(buffers: IndexBuffers, policy: IndexPolicy) -> Rebuilt:
    """Check the state (``index_buffers.STATE``) and fill all other buffers from it.

    If something is wrong the other buffers hold garbage.
    """
    problem, row, is_candidate = torch.ops.recfx.rebuild(list(buffers), list(policy)).tolist()
    return Rebuilt(problem, row, bool(is_candidate))


@library.when_loaded
def _register_fake() -> None:
    @torch.library.register_fake("recfx::rebuild")
    def _rebuild(buffers: list[Tensor], policy: list[int]) -> Tensor:
        return buffers[0].new_empty(3)
