"""A checkpoint of one policy in a table of another: what load_state_dict takes, load_checkpoint takes as well."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

import recfx
from tests.checkpoint.training import OnePart, Training, assert_same

POLICIES = {
    "error": recfx.HashConfig(dense_rows=0, buckets=4),
    "share": recfx.HashConfig(dense_rows=0, buckets=4, on_full="share"),
    "lru": recfx.HashConfig(dense_rows=0, buckets=4, on_full="evict"),
    "lfu": recfx.HashConfig(dense_rows=0, buckets=4, on_full="evict", evict="lfu"),
    "admit": recfx.HashConfig(dense_rows=0, buckets=4, admit_after=2),
    "lru_admit": recfx.HashConfig(dense_rows=0, buckets=4, on_full="evict", admit_after=3),
}
CHANGES = [
    ("error", "lru"), ("error", "lfu"), ("lru", "share"), ("lru", "error"), ("lfu", "lru"), ("lru", "lfu"),
    ("error", "admit"), ("admit", "error"), ("admit", "lru_admit"), ("lru_admit", "share"),
]  # fmt: skip


@pytest.mark.parametrize("rows", [300, 400])
@pytest.mark.parametrize(("source", "target"), CHANGES)
def test_one_policy_becomes_another(tmp_path: Path, source: str, target: str, rows: int) -> None:
    saved = Training.build(hashing=POLICIES[source], model_class=OnePart)
    saved.steps(0, 3)
    saved.save(tmp_path)
    left, right = (Training.build(hashing=POLICIES[target], model_class=OnePart, seed=3, rows=rows) for _ in range(2))
    left.steps(5, 6)
    right.steps(5, 6)
    left.load(tmp_path)
    right.model.load_state_dict(copy.deepcopy(saved.model.state_dict()), strict=False)
    assert_same(dict(left.model.state_dict()), dict(right.model.state_dict()))
    assert len(left.model.first.index("a")) == len(saved.model.first.index("a")) > 0
    left.steps(3, 5)
