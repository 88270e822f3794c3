"""Indexes as the operators take them."""

from typing import Any

import torch

from recfx.hashing import HashConfig
from recfx.hashing.state import empty_buffers
from recfx.kernels.build import library
from recfx.kernels.index import hash_index
from recfx.kernels.index.index_buffers import STATE, TAKEN, IndexBuffers, IndexPolicy
from tests.hashing.dictionary import Dictionary

NOTHING_IN_FLIGHT = 2**62
SEED = -(2**62) - 1
DERIVED = ("side_row", "free_rows", "bucket_taken", "candidate_side_row", "free_places")


def empty(index_rows: int, dense_rows: int = 0, **config: Any) -> tuple[IndexBuffers, IndexPolicy]:
    """An index that holds nothing, with so many rows to give out, or as many as its config needs."""
    assert library.load(), library.why_not()
    if config.get("unseen") == "row":
        index_rows = max(index_rows, 2 * config.get("buckets", 1))
    resolved = HashConfig(dense_rows=dense_rows, **config).resolve(index_rows + dense_rows, False)
    buffers = empty_buffers(resolved.policy)
    for side_row in (buffers.side_row, buffers.candidate_side_row):
        side_row[1:] = SEED  # the same ids are in the same slots every time
    return buffers, resolved.policy


def copy_of(buffers: IndexBuffers) -> IndexBuffers:
    return IndexBuffers(*(tensor.clone() for tensor in buffers))


def insert(
    ids: torch.Tensor, buffers: IndexBuffers, policy: IndexPolicy, oldest_in_flight: int = NOTHING_IN_FLIGHT
) -> hash_index.Inserted:
    """One batch for one table."""
    in_flight = [hash_index.InFlight.since(oldest_in_flight)]
    return hash_index.find_or_insert(ids, [0], [ids.numel()], [buffers], [policy], in_flight)


def insert_in_both(
    model: Dictionary, ids: torch.Tensor, buffers: IndexBuffers, policy: IndexPolicy, batches_in_flight: int = 0
) -> hash_index.Inserted:
    """One batch for an index and for the dictionary, whose answers are equal."""
    oldest = int(buffers.counts[0]) + 1 - batches_in_flight
    expected, got = model.insert(ids.tolist(), batches_in_flight), insert(ids, buffers, policy, oldest)
    if expected is None:
        assert int(got.report[0, 1]) >= 0
        assert got.rows.tolist() == [-1] * ids.numel()
        assert got.new_rows.numel() == got.states_before.numel() == got.ids_before.numel() == 0
        return got
    assert got.report.tolist() == [[len(expected.new_rows), -1]]
    assert got.rows.tolist() == expected.answers
    assert got.new_rows.tolist() == expected.new_rows
    assert got.states_before.tolist() == expected.states_before
    assert got.ids_before[got.states_before == TAKEN].tolist() == expected.evicted_ids
    assert got.expired_ids.tolist() == expected.expired_ids
    return got


def assert_same(left: IndexBuffers, right: IndexBuffers) -> None:
    """Equal bit for bit, except for what nobody can see: the order of slots, and what the queues have in store."""
    for name in (*STATE, *DERIVED):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    for name in ("slot_groups", "candidate_slot_groups"):
        assert _held(getattr(left, name)) == _held(getattr(right, name)), name


def _held(slot_groups: torch.Tensor) -> list[tuple[int, int]]:
    ids, rows = slot_groups.chunk(2, dim=1)
    return sorted(zip(ids[ids != -1].tolist(), rows[ids != -1].tolist(), strict=True))


def assert_sound(buffers: IndexBuffers, policy: IndexPolicy) -> None:
    """Nothing is wrong with the state, and what is derived from it anew is what has been kept up to date."""
    rebuilt = copy_of(buffers)
    assert hash_index.rebuild(rebuilt, policy) == (hash_index.NO_PROBLEM, -1, False)
    assert_same(buffers, rebuilt)
    ids, rows = buffers.row_ids[buffers.row_state == TAKEN], torch.nonzero(buffers.row_state == TAKEN).squeeze(1)
    assert torch.equal(
        hash_index.find(ids, buffers.slot_groups, buffers.side_row, policy.own_dense_rows, None, policy.row_begin), rows
    )
    if policy.admits:
        places = torch.nonzero(buffers.candidate_counts).squeeze(1)
        slots = buffers.candidate_slot_groups, buffers.candidate_side_row
        assert torch.equal(hash_index.find(buffers.candidate_ids[places], *slots, 0), places)


KINDS: list[dict[str, Any]] = [
    {"on_full": "evict", "evict": "lru"},
    {"on_full": "evict", "evict": "lfu", "admit_after": 2, "unseen": "share"},
    {"on_full": "share", "admit_after": 2},
    {"on_full": "share", "buckets": 3, "seed": 4},
    {"on_full": "evict", "evict": "lfu", "dense_rows": 3, "buckets": 2},
    {"on_full": "error"},
]
Indexes = list[tuple[IndexBuffers, IndexPolicy]]


def tables(rows: int = 16) -> Indexes:
    return [empty(rows, **kind) for kind in KINDS]


def run(
    ids: torch.Tensor, begins: list[int], ends: list[int], indexes: Indexes, in_flight: int = NOTHING_IN_FLIGHT
) -> hash_index.Inserted:
    buffers, policies = [buffers for buffers, _ in indexes], [policy for _, policy in indexes]
    return hash_index.find_or_insert(
        ids, begins, ends, buffers, policies, [hash_index.InFlight.since(in_flight)] * len(indexes)
    )
