"""``rebuild`` says what is wrong with a state, and where."""

from collections.abc import Callable

import pytest
import torch

from recfx.kernels.index import hash_index
from recfx.kernels.index.index_buffers import IndexBuffers, IndexPolicy
from tests.kernels.indexes import SEED, assert_same, assert_sound, copy_of, empty, insert

Damage = Callable[[IndexBuffers], object]


def filled() -> tuple[IndexBuffers, IndexPolicy]:
    """Rows 4 to 33 and 34 to 63 are the two buckets'; ids 100 to 129 have rows, 200 to 229 are candidates."""
    index = empty(60, dense_rows=4, buckets=2, on_full="evict", evict="lfu", admit_after=3)
    insert(torch.arange(100, 130).repeat(3), *index)
    insert(torch.arange(200, 230), *index)
    return index


def swap(values: torch.Tensor, one: int, other: int) -> None:
    values[[one, other]] = values[[other, one]]


def put(name: str, row: int, value: int) -> Damage:
    return lambda buffers: getattr(buffers, name)[row : row + 1].fill_(value)


def repeat(name: str, source: int, row: int) -> Damage:
    return lambda buffers: getattr(buffers, name)[row].copy_(getattr(buffers, name)[source])


PROBLEMS: list[tuple[str, Damage, tuple[int, int, bool]]] = [
    ("nothing", lambda b: None, (hash_index.NO_PROBLEM, -1, False)),
    ("state", put("row_state", 9, 7), (hash_index.UNKNOWN_STATE, 9, False)),
    ("dense row", put("row_state", 2, 1), (hash_index.DENSE_ROW, 2, False)),
    ("dense id", put("row_ids", 5, 3), (hash_index.DENSE_ID, 5, False)),
    ("bucket", lambda b: swap(b.row_ids, 5, 34), (hash_index.WRONG_BUCKET, 5, False)),
    ("duplicate", repeat("row_ids", 6, 8), (hash_index.DUPLICATE_ID, 8, False)),
    ("negative score", put("row_scores", 7, -1), (hash_index.BAD_SCORE, 7, False)),
    ("score of the future", put("row_scores", 7, (5 << 36) + 3), (hash_index.BAD_SCORE, 7, False)),
    ("negative count", put("candidate_counts", 9, -2), (hash_index.UNKNOWN_STATE, 9, True)),
    ("candidate in a dense row", put("candidate_counts", 1, 1), (hash_index.DENSE_ROW, 1, True)),
    ("dense candidate", put("candidate_ids", 5, 0), (hash_index.DENSE_ID, 5, True)),
    ("candidate's bucket", lambda b: swap(b.candidate_ids, 5, 34), (hash_index.WRONG_BUCKET, 5, True)),
    ("candidate twice", repeat("candidate_ids", 6, 8), (hash_index.DUPLICATE_ID, 8, True)),
    ("candidate with a row", lambda b: b.candidate_ids[4].copy_(b.row_ids[9]), (hash_index.DUPLICATE_ID, 4, True)),
]


@pytest.mark.parametrize(("damage", "expected"), [p[1:] for p in PROBLEMS], ids=[p[0] for p in PROBLEMS])
def test_rebuild_names_the_lowest_bad_row(damage: Damage, expected: tuple[int, int, bool]) -> None:
    buffers, policy = filled()
    damage(buffers)
    assert hash_index.rebuild(buffers, policy) == expected


def test_rebuild_makes_what_is_derived() -> None:
    buffers, policy = filled()
    garbage = copy_of(buffers)
    for name in (
        "slot_groups",
        "side_row",
        "free_rows",
        "bucket_taken",
        "lock",
        "candidate_slot_groups",
        "free_places",
    ):
        getattr(garbage, name).fill_(77)
    garbage.side_row[1:] = SEED  # which is chosen, not derived
    assert hash_index.rebuild(garbage, policy).problem == hash_index.NO_PROBLEM
    assert_same(garbage, buffers)
    assert_sound(garbage, policy)
    assert garbage.lock.item() == 0
