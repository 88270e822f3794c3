"""Costs of plans, without processes: they are those of the sharded model, and a thousand ranks are no trouble."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import data_parallel, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.planner.priced_plan import PricedPlan
from recfx.planner.pricing import step_price
from recfx.planner.pricing.hardware import ASCEND_910B, CPU_HOST, H100
from recfx.planner.topology import npu_topology
from tests.builders.optimizers import attach
from tests.builders.plans import model_of_tables, plan_of_kinds
from tests.sharding.models import Model
from tests.sharding.ranks import on_ranks
from tests.support.refusals import refused


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def plan_of(model: nn.Module, world_size: int, kinds: dict[str, Any]) -> ShardingPlan:
    return plan_of_kinds("ebc", model.get_submodule("ebc"), kinds, world_size)


def many_tables(count: int, is_pooled: bool = True) -> nn.Module:
    return model_of_tables([4096] * count, dim=16, is_pooled=is_pooled)


@on_ranks(2)
def test_a_plan_costs_what_the_sharded_model_costs(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Model("cpu", rows=100)
    for path in ("plain", "own"):
        attach(model.get_submodule(path), "adagrad")
    plan = recfx.plan(model, Topology(world_size, "cpu"))
    before = recfx.cost(model, CPU_HOST, plan=plan)
    sharded = recfx.convert(model, plan=plan, env=ShardingEnv.from_process_group(dist.group.WORLD), verify=False)
    after = recfx.cost(sharded, CPU_HOST)
    own = after.at(64, L=3)
    planned = before.at(64, L=3)
    names, planned, sharded, expected, actual = (
        ([node.name for node in before.nodes], [node.name for node in after.nodes] if rank == 0 else None),
        (planned.ranks, planned.seconds),
        (own.ranks, own.seconds),
        (planned.ranks[rank].wire_bytes, planned.ranks[rank].resident),
        (own.totals.wire_bytes, own.totals.resident),
    )
    assert names[1] is None or names[0] == names[1]
    assert planned == sharded
    assert expected == actual


def test_the_nodes_of_a_plan_are_those_of_its_device() -> None:
    """Ids of hashed tables are exchanged and hashed on the hosts of NPUs; GPUs exchange them themselves."""
    model = recfx.convert(many_tables(2), hashing=recfx.HashConfig(dense_rows=0, buckets=4))
    plan = plan_of(model, 2, {f"t{n}": row_wise() for n in range(2)})
    nodes_of_devices = {}
    for topology in (CPU_HOST, H100, ASCEND_910B):
        cost = recfx.cost(model, topology, plan=plan, world_size=2)
        nodes = [node for node in cost.nodes if node.kind != "dense"]
        device = {node.kind: node.device for node in nodes}
        assert device["select_features"] == device["keyed_tensor"] == cost.device == topology.device
        nodes_of_devices[cost.device] = (
            [node.kind for node in nodes][: 7 if cost.device == "cpu" else 9],
            [node.kind for node in nodes if node.on_host],
            [node.kernel for node in nodes if node.kernel],
        )
    sent = ["bucketize", "input_dist_start", "input_dist_wait"]
    assert nodes_of_devices == {
        "cpu": (["select_features", *sent, "hash_lookup", "output_dist_start", "output_dist_wait"], [], ["cpu"]),
        "cuda": (
            ["select_features", *sent, "to_host", "hash_ids", "to_device", "lookup", "output_dist_start"],
            ["hash_ids"],
            ["triton[gpu]"],
        ),
        "npu": (
            ["select_features", "to_host", *sent, "hash_ids", "to_device", "lookup", "output_dist_start"],
            [*sent, "hash_ids"],
            ["npu[vendor]"],
        ),
    }


def test_other_numbers_of_ranks() -> None:
    cost = recfx.cost(Model(), npu_topology(8))
    assert cost.at(W=16).world_size == 16
    few, many = cost.at(64, W=16, L=1), cost.at(64, W=16, L=4)
    assert few.batch == many.batch == 64
    assert (set(few.lengths.values()), set(many.lengths.values())) == ({1}, {4})
    assert many.totals.wire_bytes > few.totals.wire_bytes
    assert cost.at(W=8).world_size == 8
    sweep = cost.sweep([1, 2, 16], B=256)
    assert [(row.name, row.cost.world_size, len(row.cost.ranks)) for row in sweep] == [
        (f"W={ranks}", ranks, ranks) for ranks in (1, 2, 16)
    ]


def test_gradients_take_the_way_of_the_rows_back() -> None:
    """The rank that has the table sends its rows to all, and receives their gradients from all: equally many bytes."""

    def wire(dim: int, trains: bool) -> float:
        table = EmbeddingBagConfig(name="t", num_embeddings=4096, embedding_dim=dim, feature_names=["f"])
        model = nn.ModuleDict({"ebc": EmbeddingBagCollection([table])}).train(trains)
        plan = plan_of(model, 4, {"t": table_wise(1)})
        return recfx.cost(model, ASCEND_910B, plan=plan, world_size=4).at(B=512, L=3).parts["wire"]

    rows = wire(128, False) - wire(64, False)
    gradients = (wire(128, True) - wire(128, False)) - (wire(64, True) - wire(64, False))
    assert rows > 0
    assert gradients == pytest.approx(rows, rel=1e-9)


@pytest.mark.parametrize("is_pooled", [True, False])
def test_plans_side_by_side(is_pooled: bool) -> None:
    model = many_tables(8, is_pooled)
    spread = plan_of(model, 4, {f"t{n}": table_wise(rank=n % 4) for n in range(8)})
    heaped = plan_of(model, 4, {f"t{n}": table_wise(rank=0) for n in range(8)})
    copied = plan_of(model, 4, {f"t{n}": data_parallel() for n in range(8)})
    compared = recfx.compare_plans(
        model, {"spread": spread, "heaped": heaped, "copied": copied}, topology=CPU_HOST, world_size=4, B=2048, L=10
    )
    cost = {row.name: row.cost for row in compared}
    assert compared.best.name == "spread"
    assert cost["heaped"].imbalance > 2
    assert cost["spread"].imbalance == pytest.approx(1)
    assert cost["copied"].ranks[3].resident_bytes == 4 * cost["spread"].ranks[3].resident_bytes
    assert cost["heaped"].ranks[3].resident_bytes == 0
    (of_file,) = recfx.compare_plans(model, [PricedPlan(spread.plan, 4)], topology=CPU_HOST, B=2048, L=10)
    assert of_file.cost == cost["spread"]
    assert [row.name for row in compared] == ["spread", "heaped", "copied"]


@pytest.mark.parametrize("is_pooled", [True, False])
def test_a_thousand_ranks_without_processes(is_pooled: bool) -> None:
    model = many_tables(26, is_pooled)
    plans = [
        plan_of(model, 1024, {f"t{n}": kind(n) for n in range(26)})
        for kind in (lambda n: row_wise(), lambda n: table_wise(rank=n), lambda n: data_parallel())
    ]
    compared = recfx.compare_plans(model, plans, topology=npu_topology(1024))
    for row in compared:
        assert len(row.cost.ranks) == 1024
    rows, tables, copies = (sum(rank.resident.weights for rank in row.cost.ranks) for row in compared)
    assert rows == tables == 26 * 4096 * 16 * 4
    assert copies == 1024 * rows


def test_of_many_kinds_of_ranks_some_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of_tables([1000 * (1 + n) for n in range(24)], dim=16)
    plan = plan_of(model, 24, {f"t{n}": table_wise(rank=(5 * n) % 24) for n in range(24)})
    cost = recfx.cost(model, ASCEND_910B, plan=plan, world_size=24)
    exact = cost.at(4096, L={f"f{n}": 1 + n for n in range(24)})
    monkeypatch.setattr(step_price, "MOST_KINDS", 5)
    some = cost.at(4096, L=exact.lengths)
    assert some.seconds == pytest.approx(exact.seconds)
    assert [rank.resident for rank in some.ranks] == [rank.resident for rank in exact.ranks]
    assert all(one.seconds >= other.seconds for one, other in zip(some.ranks, exact.ranks, strict=True))
    assert len({rank.seconds for rank in exact.ranks}) == 24 > len({rank.seconds for rank in some.ranks}) == 5


@pytest.mark.parametrize(
    ("plans", "reason"),
    [
        ([], "invalid_argument"),
        ({}, "invalid_argument"),
        ("plan", "invalid_argument"),
        ([None], "invalid_argument"),
        (["plan"], "invalid_argument"),
        ([ShardingPlan({"other": {}})], "plan_unknown_collection"),
        ([ShardingPlan({})], "plan_missing_collection"),
    ],
)
def test_refuses_what_is_no_plan_of_the_model(plans: Any, reason: str) -> None:
    with refused(reason):
        recfx.compare_plans(many_tables(2), plans, world_size=1)


def test_refuses_to_plan_a_graph_or_a_number_that_is_none() -> None:
    model = recfx.convert(nn.ModuleDict({"ebc": many_tables(2)["ebc"]}))
    graph, plan = model["ebc"].graph_module, plan_of(model, 2, {f"t{number}": table_wise(rank=1) for number in (0, 1)})
    for use in (lambda: recfx.cost(graph, plan=ShardingPlan({})), lambda: recfx.cost(graph).at(W=4)):
        with refused("already_sharded"):
            use()
    planned = recfx.cost(model, Topology(2, "cpu"))
    for number in (0, "2", 2.0):
        with refused("invalid_argument", error=recfx.InputError):
            recfx.cost(model, H100, plan=plan, world_size=number)
        with refused("invalid_argument", error=recfx.InputError):
            planned.at(W=number)
    for numbers in ([], 4, None):
        with refused("invalid_argument", error=recfx.InputError):
            planned.sweep(numbers)
