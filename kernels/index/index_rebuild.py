"""Rebuild everything in an index that is derived from its state, and detect whatever is wrong with the state.

``recfx::rebuild`` runs in C++ (``csrc/index/index_rebuild.cpp``), or in ATen if there is no library.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import library
from recfx.kernels.index.buckets import bucket_begins, bucket_of
from recfx.kernels.index.free_rows import update_free_rows
from recfx.kernels.index.index_buffers import (
    BATCH_BITS,
    BATCHES,
    FREED,
    NEW_ID_BITS,
    TAKEN,
    IndexBuffers,
    IndexPolicy,
    is_uninitialized,
)
from recfx.kernels.index.slot_groups import find_in_groups, insert_into_groups

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


@library.reference("rebuild")
def rebuild_reference(tensors: list[Tensor], numbers: list[int]) -> Tensor:
    """The operator in ATen."""
    buffers, policy = IndexBuffers(*tensors), IndexPolicy(*numbers)
    for empty in (buffers.slot_groups, buffers.victim_heads, buffers.candidate_slot_groups, buffers.oldest_heads):
        empty.fill_(-1)
    for side_row in (buffers.side_row, buffers.candidate_side_row):
        side_row[:1].fill_(-1)  # what follows is the seed
    for zero in (buffers.free_rows, buffers.bucket_taken, buffers.free_places, buffers.lock, buffers.uninitialized):
        zero.zero_()
    taken = torch.nonzero((buffers.row_state != 0) & (buffers.row_state != FREED)).squeeze(1)
    ids = buffers.row_ids[taken]
    problem = _place_problems(taken, ids, policy)
    if policy.evicts:
        scores = buffers.row_scores[taken]
        last_batch = scores & (2**BATCH_BITS - 1) if policy.evict == 1 else scores
        problem[((scores < 0) | (last_batch > buffers.counts[BATCHES])) & (problem == NO_PROBLEM)] = BAD_SCORE
    states = buffers.row_state[taken]
    problem[(states != TAKEN) & ~is_uninitialized(states)] = UNKNOWN_STATE
    if bool(problem.any()):
        return _first(problem, taken, 0)
    insert_into_groups(ids, taken, buffers.slot_groups, buffers.side_row)
    _fill_free(buffers.free_rows, buffers.row_state, policy)
    buffers.uninitialized.fill_(is_uninitialized(states).sum())
    own = bucket_of(ids, policy.buckets, policy.seed) - policy.own_buckets.start
    buffers.bucket_taken.copy_(torch.bincount(own, minlength=len(policy.own_buckets)))
    if policy.admits:
        return _rebuild_candidates(buffers, policy)
    return ids.new_tensor([NO_PROBLEM, -1, 0])


def _rebuild_candidates(buffers: IndexBuffers, policy: IndexPolicy) -> Tensor:
    places = torch.nonzero(buffers.candidate_counts).squeeze(1)
    ids = buffers.candidate_ids[places]
    problem = _place_problems(places, ids, policy)
    has_row = find_in_groups(ids, buffers.slot_groups, buffers.side_row) >= 0
    problem[has_row & (problem == NO_PROBLEM)] = DUPLICATE_ID
    order = buffers.candidate_order[places]
    problem[((order < 0) | (order >> NEW_ID_BITS > buffers.counts[BATCHES])) & (problem == NO_PROBLEM)] = BAD_SCORE
    problem[buffers.candidate_counts[places] < 0] = UNKNOWN_STATE
    if bool(problem.any()):
        return _first(problem, places, 1)
    insert_into_groups(ids, places, buffers.candidate_slot_groups, buffers.candidate_side_row)
    _fill_free(buffers.free_places, (buffers.candidate_counts > 0).to(torch.uint8), policy)
    return ids.new_tensor([NO_PROBLEM, -1, 0])


def _place_problems(rows: Tensor, ids: Tensor, policy: IndexPolicy) -> Tensor:
    """What is wrong with the ids in these rows. Checks that csrc/index/index_rebuild.cpp makes first come last here."""
    table = (policy.rows, policy.dense_rows, policy.buckets)
    bucket = bucket_of(ids, policy.buckets, policy.seed)
    begin = bucket_begins(bucket, *table) - policy.row_begin
    end = bucket_begins(bucket + 1, *table) - policy.row_begin
    problem = torch.full_like(rows, NO_PROBLEM)
    problem[_appeared_before(ids)] = DUPLICATE_ID
    problem[(rows < begin) | (rows >= end)] = WRONG_BUCKET
    problem[(ids >= 0) & (ids < policy.dense_rows)] = DENSE_ID
    problem[rows < policy.own_dense_rows] = DENSE_ROW
    return problem


def _appeared_before(ids: Tensor) -> Tensor:
    """A mask of the ids that also appear earlier."""
    order = torch.argsort(ids, stable=True)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[order[1:]] = ids[order[1:]] == ids[order[:-1]]
    return repeated


def _fill_free(words: Tensor, state: Tensor, policy: IndexPolicy) -> None:
    words.zero_()
    update_free_rows(words, state, torch.arange(0, state.numel(), 64, device=state.device), policy.own_dense_rows)


def _first(problem: Tensor, rows: Tensor, is_candidate: int) -> Tensor:
    bad = torch.nonzero(problem)[0]
    return torch.cat([problem[bad], rows[bad], rows.new_tensor([is_candidate])])
