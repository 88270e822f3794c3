"""Which of TorchRec's proposals are tried: all for small models, some for large ones."""

from __future__ import annotations

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.types import ShardingPlan

import recfx
from recfx.planner.plan import planning_sharders
from recfx.planner.search import Proposal, proposals
from recfx.replacement.replace_collections import as_converted
from tests.builders.plans import model_of_tables

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


def proposed(options: list[ShardingOption], most: int, memory: int = 2**60) -> list[tuple[str, ...]]:
    capacity = Topology(4, "cuda", hbm_cap=memory // 4, ddr_cap=2**60)
    return list(map(names, proposals(options, capacity, most)))


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


def test_what_cannot_fit_is_not_proposed() -> None:
    """TorchRec's planner would try to place each of them, and fail."""
    options = options_of(9)
    expected = of_torchrec(options)
    sizes = [sum(option.total_storage.hbm for option in proposal) for proposal in expected]
    limit = sorted(sizes)[len(sizes) // 2] // 4 * 4
    fitting = [names(proposal) for proposal, size in zip(expected, sizes, strict=True) if size <= limit]
    assert 0 < len(fitting) < len(expected)
    assert proposed(options, MANY, limit)[: len(fitting)] == fitting


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
