"""Which of the plans that TorchRec's planner tries are priced as ``recfx.cost`` prices them: the best of each kind."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import numpy
from torchrec.distributed.planner.types import PerfModel, ShardingOption, Storage, Topology

from recfx.planner.planned_option import PlannedOption

MOST_MIXED = 4
"""How many plans are priced in which tables are sharded by several types."""

WHOLE = "whole"
"""How tables are cut that are not."""


class Candidates(PerfModel):
    """Rates plans by the rank that is busiest by the estimates of its shards, and keeps the best plan of each set of
    sharding types. What the nodes of all tables together cost is in no estimate, but it depends on these types.

    Args:
        topology: that of the planner.
        bound: the names of the tables to which the constraints leave one type, which does not count.

    Attributes:
        tried: the number of plans that were rated.
    """

    def __init__(self, topology: Topology, bound: Collection[str]) -> None:
        self._topology, self._bound, self.tried = topology, bound, 0
        self._best: dict[frozenset[str], tuple[float, list[ShardingOption]]] = {}

    def rate(self, plan: list[ShardingOption]) -> float:
        """Milliseconds."""
        self.tried += 1
        rating = float(busy(plan, self._topology.world_size).max())
        free = [option for option in plan if option.name not in self._bound]
        types = frozenset(WHOLE if len(option.shards) == 1 else option.sharding_type for option in free)
        if types not in self._best or rating < self._best[types][0]:
            self._best[types] = rating, copy.deepcopy(plan)
        return rating

    def chosen(self, capacity: Topology) -> list[list[ShardingOption]]:
        """The plans to price; also whole tables in the order of the model, which need no node to reorder columns."""
        of_one, mixed = ([types for types in self._best if (len(types) < 2) is alone] for alone in (True, False))
        mixed = sorted(mixed, key=lambda types: self._best[types][0])[:MOST_MIXED]
        plans = [self._best[types][1] for types in [*of_one, *mixed]]
        whole = next((plan for plan in plans if all(len(option.shards) == 1 for option in plan)), None)
        ordered = None if whole is None else in_order(whole, capacity)
        return plans if ordered is None else [*plans, ordered]


def busy(plan: Sequence[ShardingOption], ranks: int) -> numpy.ndarray:
    """The milliseconds of every rank."""
    times = numpy.zeros(ranks)
    for option in plan:
        if isinstance(option, PlannedOption) and option.is_on_all_ranks:
            times += numpy.array([kind.perf.total for kind in option.kinds])[option.kind_of_shard]
            continue
        for shard in option.shards:
            times[shard.rank] += shard.perf.total
    return times


def in_order(plan: Sequence[ShardingOption], capacity: Topology) -> list[ShardingOption] | None:
    """A plan of whole tables with the tables rank by rank, so that the busiest rank has as little to do as their order
    allows; None if they do not fit.
    """
    if capacity.world_size == 1:
        return None
    free = [device.storage for device in capacity.devices]
    low = max(option.shards[0].perf.total for option in plan)
    high, best = sum(option.shards[0].perf.total for option in plan), None
    limit = high
    while best is None or high > 1.01 * low:
        ranks = _ranks_in_order(plan, free, limit)
        if ranks is None and best is None:
            return None
        best, low, high = (best, limit, high) if ranks is None else (ranks, low, limit)
        limit = (low + high) / 2
    placed = copy.deepcopy(list(plan))
    for option, rank in zip(placed, best, strict=True):
        option.shards[0].rank = rank
    return placed


def _ranks_in_order(plan: Sequence[ShardingOption], free: Sequence[Storage], most: float) -> list[int] | None:
    """The rank of each table, if no rank works longer than ``most`` and no more tables share a rank than have to."""
    ranks: list[int] = []
    rank, left, time = 0, free[0], 0.0
    for place, option in enumerate(plan):
        storage, seconds = option.shards[0].storage, option.shards[0].perf.total
        spare = len(free) - rank > len(plan) - place and rank in ranks[-1:]
        while spare or time + seconds > most or not storage.fits_in(left):
            rank, spare, time = rank + 1, False, 0.0
            if rank == len(free):
                return None
            left = free[rank]
        left, time = left - storage, time + seconds
        ranks.append(rank)
    return ranks
