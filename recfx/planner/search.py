"""Which plans are tried, where their shards go, and the few that are priced as ``recfx.cost`` prices them."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import PartitionByType, PlannerError, ShardingOption, Topology

MOST_SHARDS, FEWEST = 1_000_000, 8
"""How many tables times ranks the greedy proposals look at, and how many of these there are at least."""

MOST_MIXED = 4
"""How many plans are priced in which tables are sharded by several types."""

Proposal = Sequence[ShardingOption]
"""One option for each table."""


@dataclass(frozen=True)
class Placed:
    """A proposal with the rank of every shard: a plan."""

    options: Proposal  # one for each table
    ranks: Sequence[Sequence[int]]  # those of the shards of each option

    @classmethod
    def of(cls, proposal: Proposal, world_size: int) -> Placed:
        """A proposal whose shards have been placed."""
        on_all = range(world_size)
        placed = ((one, [shard.rank for shard in one.shards]) for one in proposal)
        return cls(proposal, [on_all if _is_on_all_ranks(one) else ranks for one, ranks in placed])

    def assigned(self) -> list[ShardingOption]:
        """The options, whose shards are now on these ranks."""
        for option, ranks in zip(self.options, self.ranks, strict=True):
            for shard, rank in zip(option.shards, ranks, strict=True):
                shard.rank = rank
        return list(self.options)


def plans_to_price(options: Proposal, capacity: Topology, bound: Collection[str]) -> tuple[int, list[Placed]]:
    """How many plans fit, and of these the best of each set of sharding types, by the busiest rank.

    What the nodes of all tables together cost is in no estimate, but it depends on these types. Whole tables in the
    order of the model are a plan as well, because they need no node to reorder columns.

    Args:
        options: every way to shard every table, with estimates.
        capacity: the ranks with the memory that there is for tables.
        bound: the names of the tables to which the constraints leave one type, which does not count.

    Raises:
        PlannerError: no proposal fits.
    """
    ranks, partitioner = capacity.world_size, GreedyPerfPartitioner()
    times = {id(option): numpy.array(_times(option)) for option in options if _is_on_all_ranks(option)}
    best: dict[frozenset[str], tuple[float, Placed]] = {}
    seen, tried, error = set[tuple[int, ...]](), 0, None
    tables = len({option.fqn for option in options})
    for most in (max(FEWEST, MOST_SHARDS // (tables * ranks)) * factor for factor in (1, 10)):
        for proposal in proposals(options, capacity, most):
            key = tuple(map(id, proposal))
            if key in seen:
                continue
            seen.add(key)
            try:
                partitioner.partition(list(proposal), capacity)
            except PlannerError as problem:
                error = problem
                continue
            tried += 1
            placed = [option for option in proposal if id(option) not in times]
            rating = sum((times[at] for at in key if at in times), start=busy(placed, ranks)).max()
            free = [option for option in proposal if option.name not in bound]
            types = frozenset("whole" if len(option.shards) == 1 else option.sharding_type for option in free)
            if types not in best or rating < best[types][0]:
                best[types] = rating, Placed.of(proposal, ranks)
        if best:
            break  # otherwise, one of the proposals that were left out may fit
    else:
        assert error is not None
        raise error
    mixed = sorted((types for types in best if len(types) > 1), key=lambda types: best[types][0])[:MOST_MIXED]
    plans = [best[types][1] for types in [*(types for types in best if len(types) < 2), *mixed]]
    whole = next((plan.options for plan in plans if all(len(ranks) == 1 for ranks in plan.ranks)), None)
    ordered = None if whole is None else in_order(whole, capacity)
    return tried, plans if ordered is None else [*plans, ordered]


def busy(proposal: Proposal, ranks: int) -> numpy.ndarray:
    """The milliseconds of every rank."""
    times = numpy.zeros(ranks)
    for option in proposal:
        for shard in option.shards:
            times[shard.rank] += shard.perf.total
    return times


def _is_on_all_ranks(option: ShardingOption) -> bool:
    """Whether each rank has one shard, in turn, whatever is proposed."""
    return bool(option.partition_by == PartitionByType.UNIFORM.value)


def proposals(options: Proposal, capacity: Topology, most: int) -> Iterator[Proposal]:
    """A greedy series of at most so many proposals; then one sharding type for all tables that have a choice."""
    ways: dict[str, list[ShardingOption]] = {}
    for option in options:
        ways.setdefault(option.fqn, []).append(option)
    yield from _greedy(list(ways.values()), capacity, most)
    for kind in dict.fromkeys(option.sharding_type for option in options):
        of_kind = [
            [one for one in of_table if one.sharding_type == kind or len({way.sharding_type for way in of_table}) == 1]
            for of_table in ways.values()
        ]
        if all(of_kind):
            yield [min(of_table, key=lambda one: max(_times(one))) for of_table in of_kind]


def _times(option: ShardingOption) -> list[float]:
    return [shard.perf.total for shard in option.shards]


def _greedy(ways: Sequence[Proposal], capacity: Topology, most: int) -> Iterator[Proposal]:
    """The option of each table with least work; then the table whose shards take most memory takes its next one, and so
    on. Of the proposals that may fit, at most so many, at equal distances.
    """
    ordered = [sorted(of_table, key=lambda option: sum(_times(option))) for of_table in ways]
    sizes = [[_sizes(option) for option in of_table] for of_table in ordered]
    heap = [(tuple(-size for size in of_table[0]), place) for place, of_table in enumerate(sizes)]
    heapq.heapify(heap)
    chosen, fitting = bytearray(len(ordered)), list[bytes]()
    device, host = (sum(of_table[0][kind] for of_table in sizes) for kind in (1, 3))
    storages = [rank.storage for rank in capacity.devices]
    most_device, most_host = sum(one.hbm for one in storages), sum(one.ddr for one in storages)
    while True:
        if device <= most_device and host <= most_host:
            fitting.append(bytes(chosen))
        while heap and (chosen[heap[0][1]] + 1 == len(sizes[heap[0][1]]) or not any(heap[0][0])):
            heapq.heappop(heap)  # it has no other option, or takes no memory
        if not heap:
            break
        place = heap[0][1]
        before, after = sizes[place][chosen[place] : chosen[place] + 2]
        chosen[place] += 1
        device, host = device + after[1] - before[1], host + after[3] - before[3]
        heapq.heapreplace(heap, (tuple(-size for size in after), place))
    fitting = fitting or [bytes(len(ordered))]  # one that does not fit, for TorchRec's words about it
    for step in fitting[:: -(-len(fitting) // most)]:
        yield [of_table[place] for of_table, place in zip(ordered, step, strict=True)]


def _sizes(option: ShardingOption) -> tuple[int, int, int, int]:
    """The largest memory of a shard and that of all, on devices and on hosts."""
    storages: list[Any] = [shard.storage for shard in option.shards]
    device, host = [storage.hbm for storage in storages], [storage.ddr for storage in storages]
    return max(device), sum(device), max(host), sum(host)


def in_order(plan: Proposal, capacity: Topology) -> Placed | None:
    """Whole tables in this order, rank by rank, with the least work for the busiest; None if they do not fit."""
    if capacity.world_size == 1:
        return None
    seconds = [option.shards[0].perf.total for option in plan]
    low, high = max(seconds), sum(seconds)
    limits = [low + (high - low) * share / 100 for share in range(101)]
    least = bisect_left(limits, True, key=lambda limit: _ranks_in_order(plan, capacity, limit) is not None)
    ranks = _ranks_in_order(plan, capacity, limits[min(least, 100)])
    return None if ranks is None else Placed(plan, [[rank] for rank in ranks])


def _ranks_in_order(plan: Proposal, capacity: Topology, most: float) -> list[int] | None:
    """The rank of each table, if no rank works longer than ``most``; None if there are not enough ranks for that."""
    ranks = list[int]()
    rank, left, time = 0, capacity.devices[0].storage, 0.0
    for option in plan:
        storage, seconds = option.shards[0].storage, option.shards[0].perf.total
        while time + seconds > most or not storage.fits_in(left):
            rank, time = rank + 1, 0.0
            if rank == capacity.world_size:
                return None
            left = capacity.devices[rank].storage
        left, time = left - storage, time + seconds
        ranks.append(rank)
    return ranks
