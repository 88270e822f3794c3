"""Which of TorchRec's proposals are tried: all for small models, some for large ones."""

from __future__ import annotations

import pytest
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import ParameterConstraints, Proposer, ShardingOption, Storage
from torchrec.distributed.types import ShardingPlan

import recfx
from recfx.planner.plan import planning_sharders
from recfx.planner.proposers import GreedySteps, proposers
from recfx.replacement.replace_collections import as_converted
from tests.builders.plans import model_of_tables

PLENTY = Storage(hbm=2**60, ddr=2**60)


def model_of(count: int) -> nn.Module:
    return model_of_tables([1000 * (number + 1) for number in range(count)], dim=64)


def options_of(count: int) -> list[ShardingOption]:
    model = model_of(count)
    sharders = planning_sharders(model, as_converted(model), with_torchrec=True)
    return EmbeddingEnumerator(Topology(4, "cuda"), 512, {}).enumerate(model, sharders)


def all_proposals(proposer: Proposer, options: list[ShardingOption]) -> list[tuple[str, ...]]:
    """The sharding types of every proposal."""
    proposer.load(options)
    proposals = []
    while (proposal := proposer.propose()) is not None:
        proposals.append(tuple(f"{option.name} {option.sharding_type} {option.compute_kernel}" for option in proposal))
        proposer.feedback(True, proposal, 1.0)
    return proposals


@pytest.mark.parametrize("use_depth", [True, False])
def test_greedy_proposals_are_those_of_torchrec_or_some_of_them(use_depth: bool) -> None:
    options = options_of(7)
    expected = all_proposals(GreedyProposer(use_depth=use_depth), options)
    assert all_proposals(GreedySteps(use_depth, PLENTY, 10**6), options) == expected
    some = all_proposals(GreedySteps(use_depth, PLENTY, 9), options)
    assert some[0] == expected[0]
    assert 4 < len(some) < 10 < len(expected)
    assert set(some) <= set(expected)


def test_what_cannot_fit_is_not_proposed() -> None:
    """TorchRec's planner would try to place each of them, and fail."""
    options = options_of(9)
    size = {f"{way.name} {way.sharding_type} {way.compute_kernel}": way.total_storage.hbm for way in options}
    expected = all_proposals(GreedyProposer(), options)
    sizes = [sum(size[option] for option in proposal) for proposal in expected]
    limit = sorted(sizes)[len(sizes) // 2]
    proposals = all_proposals(GreedySteps(True, Storage(hbm=limit, ddr=2**60), 10**6), options)
    assert proposals == [proposal for proposal, taken in zip(expected, sizes, strict=True) if taken <= limit]
    assert 0 < len(proposals) < len(expected)


def test_with_more_ranks_and_tables_fewer_are_made() -> None:
    options, made = options_of(60), []
    for ranks, tables in ((8, 60), (1024, 60), (1024, 10_000)):
        _, greedy, *_ = proposers(Topology(ranks, "cuda", local_world_size=8, hbm_cap=2**60), tables)
        made.append(len(all_proposals(greedy, options)))
    assert made[0] > made[1] > made[2] > 1


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
