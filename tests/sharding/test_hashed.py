"""Hashed tables under every sharding type: row for row what one rank does with everybody's batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import recfx
from tests.sharding.cases import Case, Table, check, train_sharded, train_whole
from tests.sharding.ranks import ranks
from tests.sharding.test_types import TYPES

CONFIGS = {
    "error": recfx.HashConfig(dense_rows=0, rows=64, buckets=5),
    "partly_dense": recfx.HashConfig(dense_rows=7, rows=64, buckets=5),
    "lru": recfx.HashConfig(dense_rows=0, rows=96, buckets=4, on_full="evict"),
    "lfu_admit": recfx.HashConfig(
        dense_rows=0, rows=96, buckets=3, on_full="evict", evict="lfu", admit_after=2, unseen="share"
    ),
    "share": recfx.HashConfig(dense_rows=0, rows=16, buckets=2, on_full="share", unseen="share"),
    "adopted": recfx.HashConfig(),
}


def hashed_case(kind: str, config: str, **options: Any) -> Case:
    dim = 256 if kind == "grid_shard" else 8
    pooling = "SUM" if options.get("is_weighted") else "MEAN"
    tables = (
        Table("a", 11, dim, ("f0",), "SUM", TYPES[kind]),
        Table("b", 13, dim, ("f1", "f0"), pooling, TYPES[kind]),
    )
    raw_ids = {"adopted": 0, "lru": 300, "lfu_admit": 150, "share": 300}.get(config, 25)
    return Case(tables, hashing=CONFIGS[config], raw_ids=raw_ids, optimizer="adagrad", **options)


def check_hashed(case: Case, world_size: int, steps: int) -> None:
    answers = ranks(world_size).run(train_sharded, case, steps)
    expected, converted = train_whole(case, world_size, steps)
    check(case, world_size, answers, rtol=1e-4, atol=1e-5, expected=expected)
    for answer in answers:
        for table, ((first, end), state) in answer["indexes"].items():
            for name, whole in converted.index(table).state_dict().items():
                if name not in ("counts", "identity"):
                    assert torch.equal(state[name], whole[first:end]), f"{name} of table {table}"
            assert int(state["counts"][0]) == steps


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("config", sorted(CONFIGS))
@pytest.mark.parametrize("kind", sorted(set(TYPES) - {"column_wise", "table_column_wise", "grid_shard"}))
def test_a_hashed_type_equals_one_rank(kind: str, config: str, world_size: int) -> None:
    check_hashed(hashed_case(kind, config, local_size=2 if world_size == 4 else 0, sizes=(3, 5)), world_size, 6)


@pytest.mark.parametrize("config", sorted(CONFIGS))
@pytest.mark.parametrize("kind", ["column_wise", "table_column_wise", "grid_shard"])
def test_column_shards_of_a_hashed_table_agree(kind: str, config: str) -> None:
    # Adagrad: row-wise Adagrad keeps its state by column block, which is another rule.
    case = hashed_case(kind, config, local_size=2, sizes=(3, 5))
    check_hashed(Case(**{**case.__dict__, "optimizer": "adagrad"}), 4, 6)
