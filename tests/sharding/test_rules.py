"""Column blocks train as tables of their own, by the rules that look at whole rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import recfx
from tests.sharding.cases import Case
from tests.sharding.ranks import ranks
from tests.sharding.stateful import case_of, make, train, whole_state

STATE = {"rowwise_adagrad_decoupled": "momentum1", "partial_rowwise_adam": "exp_avg_sq", "lamb": "", "lars_sgd": ""}
"""The state of each rule that has a number per row."""


def trained(rank: int, world_size: int, case: Case) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The state after three steps, and what the report says."""
    model = make(case, world_size)
    train(model, case, rank, world_size, 0, 3)
    return whole_state(model), {reason.code for reason in recfx.explain(model).reasons}


@pytest.mark.parametrize("rule", STATE)
def test_each_block_of_columns_trains_like_a_table_of_its_own(rule: str) -> None:
    case = case_of("columns", None, rule)
    whole: Any = make(case, 0)
    halves = {table.name: (f"{table.name}_left", f"{table.name}_right") for table in case.tables}
    cut = replace(
        case,
        tables=tuple(
            replace(table, name=name, dim=table.dim // 2, sharding=("table_wise", 0))
            for table in case.tables
            for name in halves[table.name]
        ),
    )
    oracle: Any = make(cut, 0)
    for table in case.tables:
        blocks = whole.sparse.weight(table.name).detach().chunk(2, dim=1)
        for name, block in zip(halves[table.name], blocks, strict=True):
            oracle.sparse.weight(name).data.copy_(block)
    train(oracle, cut, 0, 0, 0, 3)
    expected = whole_state(oracle)
    for state, codes in ranks(2).run(trained, case):
        assert "optimizer_state_per_column_block" in codes
        for table in case.tables:
            key = f"embedding_bags.{table.name}.weight"
            parts = [expected[f"sparse.embedding_bags.{name}.weight"] for name in halves[table.name]]
            torch.testing.assert_close(state[f"sparse.{key}"], torch.cat(parts, dim=1), rtol=1e-4, atol=1e-6)
            if STATE[rule]:
                parts = [expected[f"embedding_bags.{name}.weight/{name}.{STATE[rule]}"] for name in halves[table.name]]
                sums = state[f"{key}/{table.name}.{STATE[rule]}"]
                torch.testing.assert_close(sums, torch.cat(parts), rtol=1e-4, atol=1e-6)
