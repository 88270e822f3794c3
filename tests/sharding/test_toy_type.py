"""A new sharding type is one file and one line in the list of types; everything that is made of types knows it then."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

import recfx
from recfx.collections.sharding.gather import gather_tables
from recfx.collections.sharding.plan import read_plan
from recfx.collections.sharding.types import SHARDING_TYPES
from tests.sharding.cases import Case, Table, build, check, plan_of, train_sharded
from tests.sharding.ranks import ranks
from tests.sharding.stateful import assert_same, make, sharded_of, train, whole_state
from tests.toys.one_rank import OneRank

TABLES = (
    Table("a", 48, 8, ("f0",), "SUM", ("one_rank", 1)),
    Table("b", 40, 4, ("f1", "f0"), "MEAN", ("one_rank", 0)),
    Table("c", 48, 8, ("f2",), "SUM", ("table_wise", 1)),
    Table("d", 48, 8, ("f0",), "MEAN", ("row_wise",)),
)
HASHED = recfx.HashConfig(dense_rows=0, rows=120, buckets=4)


def with_toy(rank: int, world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a rank's function while the list of types has one line more."""
    SHARDING_TYPES.append(OneRank())
    try:
        return function(rank, world_size, *arguments)
    finally:
        SHARDING_TYPES.pop()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_outputs_gradients_and_steps_equal_the_unsharded_model(optimizer: str) -> None:
    case = Case(TABLES, optimizer=optimizer, sizes=(3, 2))
    check(case, 2, ranks(2).run(with_toy, train_sharded, case))


def all_states(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """The state after some steps, what another model has that loaded it, and the whole tables."""
    model, again = make(case, world_size), make(case, world_size, seed=7)
    train(model, case, rank, world_size, 0, 3)
    state = whole_state(model)
    sharded_of(again).load_state_dict(sharded_of(model).state_dict(), strict=True)
    sharded_of(again).fused_optimizer.load_state_dict(sharded_of(model).fused_optimizer.state_dict())
    assert_same(whole_state(again), state)
    return {
        "state": state,
        "weights": {name: table.weight for name, table in gather_tables(sharded_of(model)).items()},
        "here": [shard.name for shard in sharded_of(model).sharding.local()],
        "report": str(recfx.explain(model)),
    }


@pytest.mark.parametrize("hashing", [None, HASHED], ids=["static", "hashed"])
def test_state_whole_tables_and_report(hashing: recfx.HashConfig | None) -> None:
    case = Case(TABLES, hashing=hashing, raw_ids=0 if hashing is None else 100, optimizer="adagrad")
    plain = make(case, 0)
    train(plain, case, 0, 0, 0, 3)
    expected = whole_state(plain)
    for rank, answer in enumerate(ranks(2).run(with_toy, all_states, case)):
        assert_same(answer["state"], expected, exact=False)
        for name, weight in answer["weights"].items():
            torch.testing.assert_close(weight, answer["state"][f"sparse.embedding_bags.{name}.weight"])
        assert answer["here"] == [["d", "b"], ["c", "d", "a"]][rank]
        assert "one_rank" in answer["report"]
        assert "toy all-to-all" in answer["report"]


def planned_and_refused() -> tuple[ShardingPlan, recfx.ConversionError]:
    converted = recfx.convert(build(Case(TABLES))[0])
    assert isinstance(converted, recfx.HashEmbeddingBagCollection)
    plan = plan_of(Case(TABLES), converted, 2)
    with pytest.raises(recfx.ConversionError) as caught:
        read_plan(converted.tables, {**plan, "c": replace(plan["c"], sharding_type="diagonal")}, 0, 2)
    return recfx.plan(converted, Topology(world_size=2, compute_device="cpu")), caught.value


def test_messages_name_it_and_planners_leave_it_out() -> None:
    plan, error = with_toy(0, 1, lambda *_: planned_and_refused())
    assert {table.sharding_type for table in plan.plan[""].values()} <= {kind.name for kind in SHARDING_TYPES}
    assert "'diagonal'" in error.message
    assert error.message.endswith("'grid_shard', 'one_rank').")


def test_no_other_file_asks_for_a_type_by_name() -> None:
    package = Path(recfx.__file__).parent
    names = {kind.name for kind in SHARDING_TYPES}
    places = [
        f"{path.relative_to(package)}:{node.lineno}: {node.value}"
        for path in package.rglob("*.py")
        if path not in (package / "collections" / "sharding" / "types.py", package / "ir" / "ways_back.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert places == []
