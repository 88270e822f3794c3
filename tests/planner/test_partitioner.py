"""Every shard gets the rank that TorchRec's partitioner gives it, and what does not fit there does not fit here."""

from __future__ import annotations

import copy
import random

import pytest
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import ParameterConstraints, Partitioner, PlannerError, ShardingOption

from recfx.planner.enumerator import OrderedEnumerator
from recfx.planner.partitioner import QuickPartitioner
from recfx.planner.plan import planning_sharders
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


def test_towers_are_left_to_torchrec() -> None:
    topology = Topology(8, "cuda", local_world_size=4)
    tables = options_by_table(topology)[:2]
    proposal = [next(option for option in each if option.sharding_type == "table_row_wise") for each in tables]
    for option in proposal:
        option.dependency = "tower"
    expected = ranks_by(GreedyPerfPartitioner(), proposal, topology)
    assert expected is not None
    assert expected[0] == expected[1]
    assert ranks_by(QuickPartitioner(), proposal, topology) == expected
