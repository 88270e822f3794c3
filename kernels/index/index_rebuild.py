"""Rebuild everything in an index that is derived from its state, and detect whatever is wrong with the state.

``recfx::rebuild`` runs in C++ (``csrc/index/index_rebuild.cpp``).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from recfx.kernels.build import library
from recfx.kernels.index.index_buffers import IndexBuffers, IndexPolicy

# What can be wrong with a row; csrc/index/index_rebuild.cpp has the same numbers.
NO_PROBLEM, UNKNOWN_STATE, DENSE_ROW, DENSE_ID, WRONG_BUCKET, DUPLICATE_ID, BAD_SCORE = range(7)


class Rebuilt(NamedTuple):
    """What ``rebuild`` found.

    Args:
        problem: ``NO_PROBLEM`` or another of the numbers above.
        row: the lowest row (or place of a candidate) that has the problem; -1 if there is no problem.
        is_candidate: whether ``row`` is the place of a candidate for admission.
    """

    problem: int
    row: int
    is_candidate: bool


def rebuild(buffers: IndexBuffers, policy: IndexPolicy) -> Rebuilt:
    """Check the state (``index_buffers.STATE``) and fill all other buffers from it, except for the hashes' seeds.

    The seeds are those in ``side_row`` and ``candidate_side_row``; see ``index_buffers.choose_seeds``.

    If there is a problem, the other buffers hold garbage afterwards.
    """
    problem, row, is_candidate = library.operators().rebuild(list(buffers), list(policy)).tolist()
    return Rebuilt(problem, row, bool(is_candidate))


@library.fake("rebuild")
def _fake(buffers: list[Tensor], policy: list[int]) -> Tensor:
    return buffers[0].new_empty(3)
