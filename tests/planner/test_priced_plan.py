"""Which plans are proposed; ``recfx.cost`` prices them, and the cheapest wins. The report of the plan, and that of a
model that was sharded by it, show its price and the runner-up.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.models.conversion_record import conversion_of
from recfx.models.replace_collections import as_converted
from recfx.planner.plan import planning_sharders
from recfx.planner.priced_plan import PricedPlan
from recfx.planner.search import Proposal, proposals
from recfx.versions.differences import make_topology
from tests.builders.collections import table
from tests.builders.models import Pooled
from tests.builders.plans import model_of_tables
from tests.sharding.models import fused_collection
from tests.sharding.ranks import on_ranks

KEYS = [f"f{number}" for number in range(4)]
TABLES = [table(f"t{number}", [key], rows=50) for number, key in enumerate(KEYS)]
BATCH = KeyedJaggedTensor(KEYS, torch.arange(8), lengths=torch.ones(8).int())


def model() -> nn.Module:
    return Pooled(EmbeddingBagCollection(TABLES))


def prices(report: recfx.Report) -> list[str]:
    return [reason.message for reason in report.reasons if reason.code == "plan_price"]


def made_plan(world_size: int) -> ShardingPlan:
    return recfx.plan(model(), make_topology(world_size, "cpu"))


WAYS: dict[str, Callable[[ShardingEnv, ShardingPlan], nn.Module]] = {
    "no_plan": lambda env, plan: recfx.convert(model(), env=env),
    "whole_graph": lambda env, plan: recfx.convert(model(), (BATCH,), env=env, whole_graph=True),
    "given_plan": lambda env, plan: recfx.convert(model(), plan=plan, env=env),
    "model_parallel": lambda env, plan: DistributedModelParallel(
        recfx.convert(model()), env, plan=plan, sharders=recfx.sharders()
    ),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_equals_what_the_report_of_the_plan_says(rank: int, world_size: int, way: str) -> None:
    plan = made_plan(world_size)
    sharded = WAYS[way](ShardingEnv.from_process_group(dist.group.WORLD), plan)
    report = recfx.explain(sharded)
    shown = {"plan": prices(recfx.explain(model(), plan=plan)), "reasons": prices(report), "text": str(report)}
    if way != "model_parallel":  # TorchRec cannot copy it
        shown["copied"] = prices(recfx.explain(copy.deepcopy(sharded)))
    record = conversion_of(sharded)
    assert pickle.loads(pickle.dumps(record)) == record
    (expected,) = shown["plan"]
    assert "; the runner-up (" in expected
    assert shown["reasons"] == shown.get("copied", [expected]) == [expected]
    assert expected in " ".join(shown["text"].split())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_copies_of_a_plan_know_whether_they_were_changed(copied: Callable[[Any], Any]) -> None:
    plan: Any = made_plan(2)
    again = copied(plan)
    assert again.is_as_priced
    again.plan["ebc"]["t0"].compute_kernel = "key_value"
    assert not again.is_as_priced
    assert plan.is_as_priced
    del plan.plan["ebc"]["t0"]
    assert not plan.is_as_priced


# Rows of the 26 tables of a DLRM on Criteo's data, no more than 100,000.
CRITEO = [
    *(100_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 100_000, 100_000, 100_000, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 100_000, 100_000, 100_000, 100_000, 12_973, 108, 36),
]


def dlrm() -> nn.Module:
    return model_of_tables(CRITEO, dim=16)


def types_by_table(plan: ShardingPlan) -> dict[str, str]:
    (tables,) = plan.plan.values()
    return {name: sharding.sharding_type for name, sharding in tables.items()}


@pytest.mark.parametrize("hashing", [None, recfx.HashConfig(dense_rows=0)], ids=["static", "hashed"])
def test_tables_of_a_dlrm_are_not_cut_by_rows(hashing: recfx.HashConfig | None) -> None:
    """As TorchRec's own sharders have it, and unlike its estimates with the types that recfx adds on a CPU."""
    model, topology = recfx.convert(dlrm(), hashing=hashing, verify=False), Topology(2, "cpu")
    stock = EmbeddingShardingPlanner(topology=topology).plan(model, recfx.sharders())
    assert list(types_by_table(stock).values()).count("row_wise") > 20
    assert set(types_by_table(recfx.plan(model, topology)).values()) == {"table_wise"}


def test_the_plan_is_the_cheapest_of_those_tried() -> None:
    model, topology = dlrm(), Topology(4, "cuda")
    plan = recfx.plan(model, topology, batch_size=4096)
    assert isinstance(plan, PricedPlan)
    alternatives = {
        kind: recfx.plan(model, topology, {f"t{n}": ParameterConstraints(sharding_types=[kind]) for n in range(26)})
        for kind in ("data_parallel", "table_wise", "column_wise")
    }
    compared = recfx.compare_plans(model, {"chosen": plan, **alternatives}, topology=topology, B=4096)
    assert compared.best.name == "chosen"
    chosen = next(row for row in compared if row.name == "chosen")
    assert chosen.cost.seconds == pytest.approx(plan.seconds)


def test_the_report_shows_the_runner_up() -> None:
    plan: Any = recfx.plan(dlrm(), Topology(2, "cpu"))
    (reason,) = [one for one in recfx.explain(dlrm(), plan=plan).reasons if one.code == "plan_price"]
    assert plan.price in reason.message
    # Whole tables as well, but not in the order of the keys.
    assert ": 26 table_wise, " in plan.price
    assert "; the runner-up (26 table_wise) takes " in plan.price


def test_a_plan_without_a_choice_has_no_runner_up() -> None:
    limits = {f"t{number}": ParameterConstraints(sharding_types=["table_wise"]) for number in range(26)}
    plan: Any = recfx.plan(dlrm(), Topology(1, "cpu"), limits)
    assert "runner-up" not in plan.price


def test_tables_on_one_rank_that_recfx_does_not_shard_take_their_times_one_after_the_other() -> None:
    seconds = []
    for names in (("e",), ("e", "f", "g")):
        model = nn.ModuleDict({"ebc": dlrm()["ebc"], "fused": fused_collection(*names)})
        constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in names}
        plan: Any = recfx.plan(model, Topology(2, "cuda"), constraints)
        seconds.append(plan.seconds)
    alone = recfx.plan(nn.ModuleDict({"ebc": dlrm()["ebc"]}), Topology(2, "cuda")).seconds
    assert seconds[1] > seconds[0] > alone


MANY = 10**6


def model_of(count: int) -> nn.Module:
    return model_of_tables([1000 * (number + 1) for number in range(count)], dim=64)


def options_of(count: int) -> list[ShardingOption]:
    model = model_of(count)
    sharders = planning_sharders(model, as_converted(model), with_torchrec=True)
    return EmbeddingEnumerator(Topology(4, "cuda"), 512, {}).enumerate(model, sharders)


def names(proposal: Proposal) -> tuple[str, ...]:
    return tuple(f"{option.name} {option.sharding_type} {option.compute_kernel}" for option in proposal)


def of_torchrec(options: list[ShardingOption]) -> list[Proposal]:
    proposer = GreedyProposer(use_depth=False)
    proposer.load(options)
    made = []
    while (proposal := proposer.propose()) is not None:
        made.append(proposal)
        proposer.feedback(True, proposal, 1.0)
    return made


def proposed(options: list[ShardingOption], most: int) -> list[tuple[str, ...]]:
    return list(map(names, proposals(options, most)))


def test_greedy_proposals_are_those_of_torchrec_or_some_of_them() -> None:
    options = options_of(7)
    expected = list(map(names, of_torchrec(options)))
    all_made = proposed(options, MANY)
    assert all_made[: len(expected)] == expected
    uniform = all_made[len(expected) :]
    assert len(uniform) == len({option.sharding_type for option in options})
    some = proposed(options, 9)[: -len(uniform)]
    assert some[0] == expected[0]
    assert 4 < len(some) < 10 < len(expected)
    assert set(some) <= set(expected)


def test_a_constraint_on_one_table_leaves_the_others_a_choice() -> None:
    """TorchRec's uniform proposals would all be of the one type that the constrained table may have."""
    model, topology = model_of(12), Topology(world_size=2, compute_device="cpu")
    free = types_by_table(recfx.plan(model, topology=topology))
    (table, *_) = free
    for only in {"data_parallel", "row_wise", "table_wise"} - {free[table]}:
        constraints = {table: ParameterConstraints(sharding_types=[only])}
        assert types_by_table(recfx.plan(model, topology=topology, constraints=constraints)) == {**free, table: only}
