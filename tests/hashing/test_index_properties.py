"""``HashIndex`` against a dictionary, with the C++ operators and with the references."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.errors import TableFullError
from recfx.hashing import HashConfig, HashIndex
from recfx.kernels import library

IDS = st.one_of(
    st.integers(-5, 60),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([-(2**63), 2**63 - 1, -1, 2**32]),
)
ACTIONS = st.sampled_from(["insert", "insert", "insert and undo", "find", "answer", "erase", "save and load"])
STEPS = st.lists(st.tuples(ACTIONS, st.lists(IDS, max_size=50)), max_size=12)


def mix64(value: int, seed: int = 0) -> int:
    def finalizer(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    return finalizer(value % 2**64 ^ finalizer(seed % 2**64)) % 2**63


class Model:
    """What the design says, in the plainest Python."""

    def __init__(self, rows: int, config: HashConfig) -> None:
        self.rows, self.seed, self.share = rows, config.seed, config.on_full == "share"
        self.dense_rows, self.buckets = config.dense_rows or 0, config.buckets or 1
        self.row_of: dict[int, int] = {}

    def bucket(self, id_: int) -> range:
        begin, end = (
            self.dense_rows + b * (self.rows - self.dense_rows) // self.buckets
            for b in (mix64(id_, self.seed) % self.buckets, mix64(id_, self.seed) % self.buckets + 1)
        )
        return range(begin, end)

    def find(self, id_: int) -> int:
        return id_ if 0 <= id_ < self.dense_rows else self.row_of.get(id_, -1)

    def shared(self, id_: int) -> int:
        bucket = self.bucket(id_)
        return bucket[mix64(id_, self.seed + 1) % len(bucket)]

    def insert(self, ids: list[int]) -> tuple[list[int], list[int]] | None:
        """None: a bucket is full, nothing changed."""
        before = dict(self.row_of)
        rows, new_rows = [], []
        for id_ in ids:
            if self.find(id_) < 0:
                free = sorted(set(self.bucket(id_)) - set(self.row_of.values()))
                if free:
                    self.row_of[id_] = free[0]
                    new_rows.append(free[0])
                elif not self.share:
                    self.row_of = before
                    return None
            rows.append(self.find(id_) if self.find(id_) >= 0 else self.shared(id_))
        return rows, new_rows


@contextmanager
def operators(kind: str) -> Iterator[None]:
    assert library.load(), library.why_not()
    if kind == "C++":
        yield
    else:
        with mock.patch.object(library, "load", return_value=False):
            yield


def assert_is(index: HashIndex, model: Model) -> None:
    ids, rows = index.items()
    assert dict(zip(ids.tolist(), rows.tolist(), strict=True)) == model.row_of
    assert rows.tolist() == sorted(rows.tolist())
    assert len(index) == len(model.row_of)
    assert torch.equal(index.find(ids), rows)


@pytest.mark.parametrize("kind", ["C++", "reference"])
@settings(max_examples=100)
@given(
    index_rows=st.integers(1, 60),
    dense_rows=st.integers(0, 4),
    buckets=st.integers(1, 4),
    on_full=st.sampled_from(["error", "share"]),
    unseen=st.sampled_from(["zeros", "share"]),
    seed=st.sampled_from([0, 1, 2**63 - 2, -(2**63)]),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    steps=STEPS,
)
def test_index_is_a_dictionary(
    kind: str,
    index_rows: int,
    dense_rows: int,
    buckets: int,
    on_full: str,
    unseen: str,
    seed: int,
    dtype: torch.dtype,
    steps: list[tuple[str, list[int]]],
) -> None:
    rows = index_rows + dense_rows
    config = HashConfig(
        dense_rows=dense_rows,
        buckets=min(buckets, index_rows),
        on_full=on_full,  # type: ignore[arg-type]
        unseen=unseen,  # type: ignore[arg-type]
        seed=seed,
    )
    with operators(kind):
        index, model = HashIndex(rows, config=config), Model(rows, config)
        for action, id_list in steps:
            if dtype == torch.int32:
                id_list = [id_ for id_ in id_list if -(2**31) <= id_ < 2**31]
            ids = torch.tensor(id_list, dtype=dtype)
            if action.startswith("insert"):
                before = dict(model.row_of)
                expected = model.insert(id_list)
                if expected is None:
                    with pytest.raises(TableFullError):
                        index.insert(ids)
                else:
                    answer, new_rows = index.insert(ids)
                    assert (answer.tolist(), new_rows.tolist()) == expected
                    if action == "insert and undo":
                        index.undo(new_rows)
                        model.row_of = before
            elif action == "find":
                assert index.find(ids).tolist() == [model.find(id_) for id_ in id_list]
            elif action == "answer":
                absent = model.shared if unseen == "share" else lambda id_: -1
                found = [model.find(id_) for id_ in id_list]
                expected_rows = [r if r >= 0 else absent(id_) for r, id_ in zip(found, id_list, strict=True)]
                assert index.answer(ids).tolist() == expected_rows
            elif action == "erase":
                expected_rows = [model.row_of.pop(id_, -1) for id_ in id_list]
                assert index.erase(ids).tolist() == expected_rows
            else:
                loaded = HashIndex(rows, config=config)
                loaded.load_state_dict({key: value.clone() for key, value in index.state_dict().items()})
                index = loaded
            assert_is(index, model)


@pytest.mark.parametrize("on_full", ["error", "share"])
def test_every_row_of_a_bucket_is_usable(on_full: str) -> None:
    """As many ids as rows, all in the buckets that have room: all fit, and not one more."""
    index = HashIndex(100, config=HashConfig(buckets=4, on_full=on_full))  # type: ignore[arg-type]
    model = Model(100, HashConfig(buckets=4))
    room = {bucket.start: 25 for bucket in (model.bucket(id_) for id_ in range(200))}
    chosen = []
    for id_ in range(1000):
        start = model.bucket(id_).start
        if room[start] > 0:
            room[start] -= 1
            chosen.append(id_)
    rows = index.find_or_insert(torch.tensor(chosen))
    assert sorted(rows.tolist()) == list(range(100))
    assert index.occupancy() == (100, 100, 0, 25, 25)
    if on_full == "error":
        with pytest.raises(TableFullError):
            index.find_or_insert(torch.tensor([2000]))
    else:
        assert index.find_or_insert(torch.tensor([2000])).tolist() == [model.shared(2000)]
        assert index.find(torch.tensor([2000])).tolist() == [-1]


def test_long_life_does_not_wear_out_the_index() -> None:
    """A thousand generations of fill and erase: the slots are as empty after it as in the beginning."""
    index = HashIndex(300, config=HashConfig(buckets=1))
    for generation in range(1000):
        ids = torch.arange(300) * 977 + generation * 1_000_003
        assert torch.equal(index.insert(ids)[1], torch.arange(300))
        assert (index.erase(ids[torch.randperm(300)]) >= 0).all()
    assert (index.slots == -1).all()
    assert index.occupancy().taken == 0
    assert index.find(torch.arange(-2, 1000)).unique().tolist() == [-1]
