"""Which of TorchRec's proposals are priced: all for small models, some for large ones, and the report says so."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import ParameterConstraints, Proposer, ShardingOption, Storage
from torchrec.distributed.types import ShardingPlan

import recfx
from recfx.planner import plan as planning
from recfx.planner.enumerator import OrderedEnumerator
from recfx.planner.plan import planning_sharders
from recfx.planner.priced_plan import PricedPlan
from recfx.planner.proposers import GreedySteps, proposers
from recfx.replacement.replace_collections import as_converted
from tests.builders.plans import model_of_tables


def model_of(count: int) -> nn.Module:
    return model_of_tables([1000 * (number + 1) for number in range(count)], dim=64)


def options_of(model: nn.Module, topology: Topology) -> list[ShardingOption]:
    sharders = planning_sharders(model, as_converted(model), with_torchrec=True)
    return OrderedEnumerator(topology, 512, {}).enumerate(model, sharders)


def all_proposals(proposer: Proposer, options: list[ShardingOption], best: int = -1) -> list[tuple[str, ...]]:
    """The sharding types of every proposal, if that of number ``best`` among all steps is the best one."""
    proposer.load(options)
    proposals = []
    while (proposal := proposer.propose()) is not None:
        proposals.append(tuple(f"{option.name} {option.sharding_type} {option.compute_kernel}" for option in proposal))
        step = proposer._pending[0] if isinstance(proposer, GreedySteps) else len(proposals)
        proposer.feedback(True, proposal, float(abs(step - best)))
    return proposals


@pytest.mark.parametrize("use_depth", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_limit_the_proposals_are_those_of_torchrec(device: str, use_depth: bool) -> None:
    topology = Topology(4, device)
    options = options_of(model_of(7), topology)
    expected = all_proposals(GreedyProposer(use_depth=use_depth), options)
    assert len(expected) > 20
    steps = GreedySteps(use_depth, Storage(hbm=2**60, ddr=2**60), 10**6)
    assert all_proposals(steps, options) == expected
    assert (steps.made, steps.total) == (len(expected), len(expected))


def test_with_a_limit_they_are_some_and_those_around_the_best() -> None:
    topology = Topology(4, "cuda")
    options = options_of(model_of(60), topology)
    expected = all_proposals(GreedyProposer(), options)
    steps = GreedySteps(True, Storage(hbm=2**60, ddr=2**60), 60)
    proposals = all_proposals(steps, options, best=101)
    assert steps.total == len(expected) > 200
    assert 40 <= len(proposals) == steps.made < 60
    assert proposals[0] == expected[0]
    assert expected[101] in proposals
    assert set(proposals) <= set(expected)
    assert len(set(proposals)) == len(proposals)


def test_what_cannot_fit_is_not_proposed() -> None:
    """TorchRec's planner would try to place each of them, and fail."""
    options = options_of(model_of(9), Topology(4, "cuda"))
    size = {f"{way.name} {way.sharding_type} {way.compute_kernel}": way.total_storage.hbm for way in options}
    expected = all_proposals(GreedyProposer(), options)
    sizes = [sum(size[option] for option in proposal) for proposal in expected]
    limit = sorted(sizes)[len(sizes) // 2]
    proposals = all_proposals(GreedySteps(True, Storage(hbm=limit, ddr=2**60), 10**6), options)
    assert proposals == [proposal for proposal, taken in zip(expected, sizes, strict=True) if taken <= limit]
    assert 0 < len(proposals) < len(expected)


def test_the_report_says_how_many_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, topology = model_of(30), Topology(4, "cuda")
    whole = recfx.plan(model, topology)
    monkeypatch.setattr(planning, "proposers", partial(proposers, most_tables=0))
    plan = recfx.plan(model, topology)
    assert isinstance(whole, PricedPlan)
    assert isinstance(plan, PricedPlan)
    assert whole.pricing.left_out == 0
    assert " left out " not in str(whole.pricing)
    assert plan.pricing.left_out > 0
    assert f" plans ({plan.pricing.left_out:,} similar ones were left out to save time): " in str(plan.pricing)
    assert plan.pricing.tried < whole.pricing.tried
    assert plan.pricing.chosen.seconds == pytest.approx(whole.pricing.chosen.seconds, rel=0.05)


def test_if_none_of_some_fits_more_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def only_one(topology: Topology, *most_tables: int) -> list[Proposer]:
        asked.append(most_tables)
        greedy = GreedySteps(True, Storage(hbm=2**60, ddr=2**60), *(most_tables or (0,)))
        if not most_tables:
            monkeypatch.setattr(greedy, "load", lambda *_, **__: setattr(greedy, "total", 10))
        return [greedy]

    monkeypatch.setattr(planning, "proposers", only_one)
    plan = recfx.plan(model_of(3), Topology(2, "cuda"))
    assert [len(proposed) for proposed in asked] == [0, 1]
    assert len(plan.plan["ebc"]) == 3


def test_more_ranks_take_more_time_so_fewer_proposals_are_priced() -> None:
    options = options_of(model_of(60), Topology(8, "cuda"))
    made = []
    for ranks in (8, 1024):
        _, greedy, *_ = proposers(Topology(ranks, "cuda", local_world_size=8, hbm_cap=2**60))
        made.append(len(all_proposals(greedy, options)))
    assert made[0] > 200 > made[1] >= 40
    greedy = GreedySteps(True, Storage(hbm=2**60, ddr=2**60), 0, ranks=10**6)
    assert 8 <= len(all_proposals(greedy, options)) < 40


def test_a_constraint_on_one_table_leaves_the_others_a_choice() -> None:
    """TorchRec's uniform proposals would all be of the one type that the constrained table may have."""
    model, topology = model_of(12), Topology(world_size=2, compute_device="cpu")
    free = types_of(recfx.plan(model, topology=topology))
    (table, *_) = free
    for only in {"data_parallel", "row_wise", "table_wise"} - {free[table]}:
        constraints = {table: ParameterConstraints(sharding_types=[only])}
        assert types_of(recfx.plan(model, topology=topology, constraints=constraints)) == {**free, table: only}


def types_of(plan: ShardingPlan) -> dict[str, str]:
    (tables,) = plan.plan.values()
    return {name: sharding.sharding_type for name, sharding in tables.items()}
