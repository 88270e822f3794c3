"""Ids and configs for random tests of indexes, and what such tests compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hypothesis import strategies as st

from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.build import library
from tests.support.references import references

EXTREMES = [-(2**63), 2**63 - 1, -1, 2**32, -2]


IDS = st.one_of(st.integers(-5, 60), st.integers(-(2**63), 2**63 - 1), st.sampled_from(EXTREMES))


# Few different ids, so that a table is full soon and its ids come back.
CROWD = st.builds(
    lambda first, count, stride: [(first + i * stride) % 60 - 5 for i in range(count)],
    st.integers(0, 60), st.integers(4, 40), st.sampled_from([1, 7, 0, 3]),
)  # fmt: skip


@st.composite
def configurations(draw: st.DrawFn) -> tuple[int, HashConfig]:
    index_rows, dense_rows = draw(st.one_of(st.integers(1, 12), st.integers(1, 60))), draw(st.sampled_from([0, 0, 3]))
    config = HashConfig(
        dense_rows=dense_rows,
        buckets=min(draw(st.integers(1, 4)), index_rows),
        on_full=draw(st.sampled_from(["error", "share", "evict", "evict"])),
        evict=draw(st.sampled_from(["lru", "lfu"])),
        admit_after=draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
        unseen=draw(st.sampled_from(["zeros", "share"])),
        seed=draw(st.sampled_from([0, 1, 2**63 - 2, -(2**63)])),
    )
    return index_rows + dense_rows, config


@contextmanager
def operators(kind: str) -> Iterator[None]:
    assert library.load(), library.why_not()
    if kind == "C++":
        yield
    else:
        with references():
            yield


def state_of(index: HashIndex) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in index.state_dict().items()}


def assert_same_state(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        assert torch.equal(tensor, right[key]), key
