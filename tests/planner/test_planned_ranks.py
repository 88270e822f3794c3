"""How many ranks a plan is for: everything that takes a plan goes by what it was made for, and guesses nothing."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import data_parallel, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.collections.sharding.collection import sharded_collections
from recfx.planner import plan as planning
from recfx.planner.priced_plan import PricedPlan, world_size_of
from recfx.planner.pricing.hardware import H100
from recfx.planner.topology import npu_topology
from recfx.versions.differences import make_topology
from tests.builders.collections import sequences, tables_named
from tests.builders.plans import plan_of_kinds
from tests.drawing.page_data import data_of, text_of
from tests.sharding.ranks import ranks
from tests.support.fake_group import fake_group
from tests.support.refusals import refused

TABLES = ["a", "b", "c", "d", "e"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = tables_named(*TABLES)


def on_ranks_0_to_4(topology: Any) -> ShardingPlan:
    """A plan with a table on each of the first five ranks, if there are more."""
    constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in TABLES}
    return recfx.plan(Model(), topology, constraints)


def stock(kind: Callable[[int], Any], world_size: int) -> ShardingPlan:
    """TorchRec's plan for a number of ranks that it does not carry."""
    kinds = {name: kind(number) for number, name in enumerate(TABLES)}
    return plan_of_kinds("ebc", Model().ebc, kinds, world_size)


def ranks_drawn(folder: Path, plan: ShardingPlan, **arguments: Any) -> str:
    path = folder / "model.html"
    recfx.draw(Model(), path, plan=plan, **arguments)
    return text_of(path)


def world_sizes(report: recfx.Report) -> set[int]:
    return {table.sharding.world_size for table in report.collections[0].tables if table.sharding}


@pytest.mark.parametrize("again", [lambda plan: plan, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_plan_of_ours_knows_its_ranks_and_their_hardware(again: Callable[[Any], Any], tmp_path: Path) -> None:
    plan = again(on_ranks_0_to_4(npu_topology(8)))
    assert isinstance(plan, PricedPlan)
    assert plan.world_size == 8
    priced = recfx.cost(Model(), plan=plan).at(64)
    assert (len(priced.ranks), priced.hardware.name) == (8, "Ascend 910B")
    (row,) = recfx.compare_plans(Model(), [plan])
    assert (row.cost.world_size, row.cost.hardware.name) == (8, "Ascend 910B")
    assert world_sizes(recfx.explain(Model(), plan=plan)) == {8}
    assert "rank 0 of 8" in ranks_drawn(tmp_path, plan)
    assert data_of(tmp_path / "model.html")["costs"]["hardware"] == priced.hardware.label
    for other in (H100, make_topology(8, "cpu")):
        priced = recfx.cost(Model(), other, plan=plan).at(64)
        assert (len(priced.ranks), priced.hardware.device) == (8, other.device if other is H100 else "cpu")


def test_a_plan_of_ours_for_other_ranks_is_refused(tmp_path: Path) -> None:
    plan, model = on_ranks_0_to_4(npu_topology(8)), Model()
    four = make_topology(4, "cpu")

    def convert() -> None:
        with fake_group(0, 6) as group:
            recfx.convert(model, plan=plan, env=ShardingEnv.from_process_group(group))

    for use in (
        lambda: recfx.cost(model, plan=plan, world_size=6),
        lambda: recfx.cost(model, four, plan=plan),
        lambda: recfx.compare_plans(model, [plan], world_size=6),
        lambda: recfx.draw(model, tmp_path / "model.html", plan=plan, world_size=6),
        lambda: recfx.draw(model, tmp_path / "model.html", four, plan=plan),
        lambda: recfx.explain(model, plan=plan, world_size=6),
        convert,
    ):
        with refused("plan_rank", match="was made for 8 ranks"):
            use()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (lambda: stock(lambda number: data_parallel(), 2), "places a shard on rank 1, but ranks are 0 to 0"),
        (lambda: PricedPlan(stock(lambda number: table_wise(rank=0), 1).plan, 2), "was made for 2 ranks, not for 1"),
    ],
    ids=["ranks of tables", "ranks of the plan"],
)
def test_model_parallel_refuses_a_plan_for_other_ranks(plan: Callable[[], ShardingPlan], told: str) -> None:
    with fake_group(0, 1) as group, refused("plan_rank", match=told):
        env = ShardingEnv.from_process_group(group)
        DistributedModelParallel(recfx.convert(Model()), env, torch.device("cpu"), plan())


@pytest.mark.parametrize("kind", [data_parallel, row_wise], ids=["data_parallel", "row_wise"])
def test_a_table_on_all_ranks_tells_how_many_there_are(kind: Callable[[], Any]) -> None:
    plan = stock(lambda number: kind() if number == 3 else table_wise(rank=number % 2), 8)
    assert recfx.cost(Model(), plan=plan).world_size == 8
    assert world_sizes(recfx.explain(Model(), plan=plan)) == {8}


def test_ranks_of_any_integer_type_tell_how_many_there_are() -> None:
    plan = stock(lambda number: row_wise(), 8)
    for table in plan.plan["ebc"].values():
        table.ranks = [numpy.int64(rank) for rank in table.ranks]
    assert recfx.cost(Model(), plan=plan).world_size == 8
    tables: Any = plan.plan["ebc"]
    for table in tables.values():
        table.ranks = None  # its shards name them
    assert world_size_of(plan) == 8
    tables[TABLES[0]].sharding_type = ["row_wise"]
    with refused("unsupported_sharding_type"):
        recfx.cost(Model(), plan=plan)
    tables[TABLES[0]] = "row_wise"
    with refused("invalid_argument"):
        recfx.cost(Model(), plan=plan)


def test_a_stock_plan_that_does_not_tell_needs_a_number(tmp_path: Path) -> None:
    plan, model = stock(lambda number: table_wise(rank=number), 8), Model()
    for use in (
        lambda: recfx.cost(model, plan=plan),
        lambda: recfx.cost(model, H100, plan=plan),
        lambda: recfx.compare_plans(model, [plan]),
        lambda: recfx.draw(model, tmp_path / "model.html", plan=plan),
        lambda: recfx.explain(model, plan=plan),
    ):
        with refused("unknown_world_size", match="world_size="):
            use()
    assert recfx.cost(model, plan=plan, world_size=8).world_size == 8
    assert recfx.cost(model, npu_topology(8), plan=plan).world_size == 8
    assert "rank 0 of 8" in ranks_drawn(tmp_path, plan, world_size=8)
    assert world_sizes(recfx.explain(model, plan=plan, world_size=8)) == {8}
    with fake_group(0, 8):
        assert recfx.explain(model, plan=plan).ok  # as convert would shard it here


# ``convert`` with ranks and without a plan


def types_and_plan(rank: int, world_size: int) -> tuple[Any, Any]:
    env = ShardingEnv.from_process_group(dist.group.WORLD)

    def model() -> nn.Module:
        return nn.ModuleDict({"pooled": Model(), "sequence": sequences()})

    sharded = recfx.convert(model(), env=env, verify=False)
    plan: Any = recfx.plan(model(), Topology(world_size, "cpu")).plan
    types = {
        path: {table.table.name: table.type.name for table in collection.sharding.tables}
        for path, collection in sharded_collections(sharded).items()
    }
    return types, {path: {name: table.sharding_type for name, table in part.items()} for path, part in plan.items()}


def test_the_plan_is_that_of_recfx() -> None:
    """TorchRec's planner would cut each of these small tables by rows."""
    first, second = ranks(2).run(types_and_plan)
    assert first == second
    planned, expected = first
    assert planned == expected
    assert planned.keys() == {"pooled.ebc", "sequence"}
    assert all("row_wise" not in types.values() for types in planned.values())


def refused_by_the_planner(rank: int, world_size: int) -> str:
    def fail(*_: Any, **__: Any) -> Any:
        raise recfx.ConversionError("too large", reason="plan_does_not_fit")

    with mock.patch.object(planning, "make_plan", fail):
        try:
            recfx.convert(Model(), env=ShardingEnv.from_process_group(dist.group.WORLD), verify=False)
        except recfx.ConversionError as error:
            return error.reason
    return ""


def test_all_ranks_get_the_error_of_the_one_that_plans() -> None:
    assert ranks(2).run(refused_by_the_planner) == ["plan_does_not_fit"] * 2
