"""Every shard gets the rank that TorchRec's partitioner gives it, and what does not fit there does not fit here."""

from __future__ import annotations

import copy
import math
import random
from itertools import combinations_with_replacement, pairwise

import pytest
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import ParameterConstraints, Partitioner, PlannerError, ShardingOption

from recfx.planner.enumerator import OrderedEnumerator
from recfx.planner.partitioner import QuickPartitioner
from recfx.planner.plan import planning_sharders
from recfx.planner.proposers import TablesInOrder
from recfx.planner.sharder import planned_types
from recfx.replacement.replace_collections import as_converted
from tests.builders.plans import model_of_tables

ROWS = [999, 10_007, 40_000, 70_000, 100_003, 250_000, 300_000, 500_000, 800_000, 1_000_001]
TYPES = planned_types()


def options_by_table(topology: Topology) -> list[list[ShardingOption]]:
    model = model_of_tables(ROWS, dim=512)
    limits = {f"t{n}": ParameterConstraints(sharding_types=TYPES, min_partition=64) for n in range(len(ROWS))}
    sharders = planning_sharders(model, as_converted(model), with_torchrec=False)
    options = OrderedEnumerator(topology, 512, limits).enumerate(model, sharders)
    return [[option for option in options if option.name == name] for name in limits]


def ranks_by(partitioner: Partitioner, proposal: list[ShardingOption], topology: Topology) -> list[list[int]] | None:
    """The ranks of all shards; None if they do not fit."""
    try:
        placed = partitioner.partition(copy.deepcopy(proposal), topology)
    except PlannerError:
        return None
    return [[shard.rank for shard in option.shards] for option in placed]


@pytest.mark.parametrize(("hosts", "gib"), [(4, 80.0), (4, 0.9), (3, 0.9), (1, 16.0)])
def test_ranks_are_those_of_torchrec(hosts: int, gib: float) -> None:
    topology = Topology(4 * hosts, "cuda", local_world_size=4, hbm_cap=int(gib * 2**30))
    tables, choices = options_by_table(topology), random.Random(0)
    proposals = [[choices.choice(options) for options in tables] for _ in range(40)]
    types = {option.sharding_type for proposal in proposals for option in proposal}
    expected = [ranks_by(GreedyPerfPartitioner(), proposal, topology) for proposal in proposals]
    assert types == set(TYPES)
    assert [ranks_by(QuickPartitioner(), proposal, topology) for proposal in proposals] == expected
    assert (None in expected) == (gib == 0.9)
    assert any(expected)


@pytest.mark.parametrize(("ranks", "gib"), [(16, 80.0), (10, 80.0), (4, 80.0), (4, 2.9), (4, 1.4)])
def test_tables_in_order_are_as_even_as_their_order_allows(ranks: int, gib: float) -> None:
    topology = Topology(ranks, "cuda", hbm_cap=int(gib * 2**30))
    proposer = TablesInOrder()
    proposer.load([option for options in options_by_table(topology) for option in options])
    options = proposer.propose()
    assert options is not None
    times = [option.shards[0].perf.total for option in options]
    sizes = [option.total_storage.hbm for option in options]

    def most(ends: tuple[int, ...]) -> float:
        blocks = list(pairwise((0, *ends, len(options))))
        fits = all(sum(sizes[begin:end]) <= gib * 2**30 for begin, end in blocks)
        return max(sum(times[begin:end]) for begin, end in blocks) if fits else math.inf

    least = min(map(most, combinations_with_replacement(range(len(options) + 1), min(ranks, len(options)) - 1)))
    placed = ranks_by(QuickPartitioner(), options, topology)
    if placed is None:
        assert least == math.inf
        return
    assert placed == sorted(placed)
    ends = [sum(rank < [number] for rank in placed) for number in range(1, ranks)]
    assert least <= most(tuple(ends)) <= 1.01 * least
    if ranks >= len(options):
        assert placed == [[number] for number in range(len(options))]


def test_towers_are_left_to_torchrec() -> None:
    topology = Topology(8, "cuda", local_world_size=4)
    tables = options_by_table(topology)[:2]
    proposal = [next(option for option in table if option.sharding_type == "table_row_wise") for table in tables]
    for option in proposal:
        option.dependency = "tower"
    expected = ranks_by(GreedyPerfPartitioner(), proposal, topology)
    assert expected is not None
    assert expected[0] == expected[1]
    assert ranks_by(QuickPartitioner(), proposal, topology) == expected
