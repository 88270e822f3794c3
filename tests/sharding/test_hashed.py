"""Hashed tables under every sharding type: row for row what one rank does with everybody's batches."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.cases import Case, check, train_sharded, train_whole
from tests.sharding.ranks import ranks
from tests.sharding.typical_cases import CONFIGS, TYPES, hashed_case


def check_hashed(case: Case, world_size: int, steps: int) -> None:
    answers = ranks(world_size).run(train_sharded, case, steps)
    expected, converted = train_whole(case, world_size, steps)
    check(case, world_size, answers, rtol=1e-4, atol=1e-5, expected=expected)
    for answer in answers:
        for table, ((first, end), state) in answer["indexes"].items():
            for name, whole in converted.index(table).state_dict().items():
                if name not in ("counts", "slice_counts", "identity"):
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
