"""The rules that TorchRec has classes for but cannot run on the CPU, under every sharding type."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import recfx
from tests.sharding.cases import Case
from tests.sharding.ranks import ranks
from tests.sharding.stateful import LRU, assert_same, case_of, make, sharded_of, train, whole_state

RULES = ("rowwise_adagrad_decoupled", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb", "lars_sgd")
PER_ROW = {
    "rowwise_adagrad_decoupled": "momentum1",
    "partial_rowwise_adam": "exp_avg_sq",
    "partial_rowwise_lamb": "exp_avg_sq",
}
every_rule = pytest.mark.parametrize("rule", RULES)


def train_and_reload(rank: int, world_size: int, case: Case, folder: str) -> list[dict[str, torch.Tensor]]:
    """The state after three steps; after two more; and after those of models that loaded the state of three."""
    model, keyed, loaded = (make(case, world_size, seed) for seed in (0, 5, 6))
    train(model, case, rank, world_size, 0, 3)
    states = [whole_state(model)]
    ours, theirs = sharded_of(model), sharded_of(keyed)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    theirs.fused_optimizer.load_state_dict(copy.deepcopy(ours.fused_optimizer.state_dict()))
    recfx.save_checkpoint(model, folder)
    recfx.load_checkpoint(loaded, folder)
    for trained in (model, keyed, loaded):
        train(trained, case, rank, world_size, 3, 5)
        states.append(whole_state(trained))
    return states


@pytest.mark.parametrize(
    ("rule", "plan", "hashing"),
    [
        *((rule, "rows", LRU) for rule in RULES),
        ("partial_rowwise_lamb", "tables", LRU),
        ("partial_rowwise_adam", "replicas", None),
    ],
)
def test_training_is_that_of_the_unsharded_model(
    rule: str, plan: str, hashing: recfx.HashConfig | None, tmp_path: Path
) -> None:
    case = case_of(plan, hashing, rule)
    whole = make(case, 0)
    train(whole, case, 0, 0, 0, 3)
    expected = whole_state(whole)
    for after_three, after_five, *reloaded in ranks(2).run(train_and_reload, case, str(tmp_path)):
        assert_same(after_three, expected, exact=False)
        for state in reloaded:
            assert_same(state, after_five)


def blocks_of(case: Case, names: dict[str, list[tuple[int, int]]]) -> tuple[Case, Any]:
    """A case in which each column block is a table of its own, and its unsharded model with the same weights."""
    tables = [
        replace(table, name=f"{table.name}_{left}", dim=right - left, sharding=("table_wise", 0))
        for table in case.tables
        for left, right in names[table.name]
    ]
    cut = replace(case, tables=tuple(tables))
    whole: Any = make(case, 0)
    model: Any = make(cut, 0)
    for table in case.tables:
        for left, right in names[table.name]:
            block = whole.sparse.weight(table.name).detach()[:, left:right]
            model.sparse.weight(f"{table.name}_{left}").data.copy_(block)
    return cut, model


def report(rank: int, world_size: int, case: Case) -> set[str]:
    (collection,) = recfx.explain(make(case, world_size)).collections
    return {reason.code for table in collection.tables for reason in table.reasons}


@every_rule
def test_each_block_of_columns_trains_like_a_table_of_its_own(rule: str, tmp_path: Path) -> None:
    case = case_of("columns", None, rule)
    blocks = {table.name: [(0, table.dim // 2), (table.dim // 2, table.dim)] for table in case.tables}
    cut, whole = blocks_of(case, blocks)
    train(whole, cut, 0, 0, 0, 3)
    expected = whole_state(whole)
    for after_three, after_five, *reloaded in ranks(2).run(train_and_reload, case, str(tmp_path)):
        for table in case.tables:
            key = f"embedding_bags.{table.name}.weight"
            parts = [expected[f"sparse.embedding_bags.{table.name}_{left}.weight"] for left, _ in blocks[table.name]]
            torch.testing.assert_close(after_three[f"sparse.{key}"], torch.cat(parts, dim=1), rtol=1e-4, atol=1e-6)
            if rule in PER_ROW:
                sums = after_three[f"{key}/{table.name}.{PER_ROW[rule]}"]
                names = [f"{table.name}_{left}" for left, _ in blocks[table.name]]
                parts = [expected[f"embedding_bags.{name}.weight/{name}.{PER_ROW[rule]}"] for name in names]
                torch.testing.assert_close(sums, torch.cat(parts), rtol=1e-4, atol=1e-6)
        for state in reloaded:
            assert_same(state, after_five)
    assert all("optimizer_state_per_column_block" in codes for codes in ranks(2).run(report, case))
