"""The search for a plan: every way to shard every table, the plans that are tried, and where their shards go.

Ways, estimates and places are TorchRec's. The few plans that are best by estimates are priced as ``recfx.cost`` prices
them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy
from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PartitionByType,
    PlannerError,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from recfx.collections.converted_collection import index_of
from recfx.collections.sharding.types import SHARDING_TYPES
from recfx.errors import ConversionError
from recfx.hashing import row_cuts
from recfx.planner.sharder import planned_types


class ShardingOptions(EmbeddingEnumerator):
    """TorchRec's enumerator in an order that does not depend on the process, as that of sets of strings does.

    Options that TorchRec's planner would choose and then refuse, those for whole hosts if the last host has fewer
    ranks, and cuts that leave ranks without rows are left out (``empty_ranks`` allows the latter where the constraints
    leave no other). Tables with an index are cut between buckets, and the memory of a shard has its part of the index.
    """

    def __init__(
        self, topology: Topology, batch_size: int, limits: dict[str, ParameterConstraints], empty_ranks: bool
    ) -> None:
        self._empty_ranks = empty_ranks
        self._has_whole_hosts = topology.world_size % topology.local_world_size == 0
        super().__init__(topology, batch_size, limits)

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Every way to shard every table, with estimates; ``no_sharding_option`` if a table has none."""
        options: list[ShardingOption] = super().enumerate(module, sharders)
        options = [option for option in options if is_plannable(option.sharding_type, option.compute_kernel)]
        places = {fqn: place for place, fqn in enumerate(dict.fromkeys(option.fqn for option in options))}
        by_host = PartitionByType.HOST.value
        kept = [option for option in options if self._has_whole_hosts or option.partition_by != by_host]
        chosen = [option for option in kept if all(shard.size[0] > 0 for shard in option.shards)]
        if self._empty_ranks:  # for tables that have no other option
            chosen += _without(kept, chosen)
        for option in _without(options, chosen):
            raise no_sharding_option(option.name, option.path, f"{option.sharding_type}, on the ranks that there are,")
        order = tuple(SHARDING_TYPES)
        return sorted(chosen, key=lambda one: (places[one.fqn], order.index(one.sharding_type), one.compute_kernel))

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimate the shards in the sizes that they will really have, and each size once."""
        shards_of = []
        for option in sharding_options:
            _cut_between_buckets(option)
            shards_of.append(option.shards)
            option.shards = list({tuple(shard.size): shard for shard in reversed(option.shards)}.values())
        super().populate_estimates(sharding_options)
        for option, shards in zip(sharding_options, shards_of, strict=True):
            index = index_of(option.module[1], option.name)
            size = 0 if index is None else sum(buffer.nbytes for buffer in index.buffers())
            estimated = {tuple(shard.size): shard for shard in option.shards}
            for shard in option.shards:
                shard.storage += Storage(hbm=0, ddr=math.ceil(size * shard.size[0] / option.tensor.shape[0]))
            for shard in shards:
                like = estimated[tuple(shard.size)]
                shard.storage, shard.perf = like.storage, like.perf
            option.shards = shards


def is_plannable(sharding_type: str, kernel: str) -> bool:
    """Whether TorchRec's planner accepts the two together in its result."""
    return kernel not in SHARDING_TYPES[sharding_type].unplanned_kernels


def _cut_between_buckets(option: ShardingOption) -> None:
    """Give the shards of a table with an index the rows that ``read_plan`` of sharded collections gives them."""
    index = index_of(option.module[1], option.name)
    if index is None or not SHARDING_TYPES[option.sharding_type].cuts_rows:
        return
    blocks: dict[int, list[Shard]] = {}  # by first column
    for shard in option.shards:
        blocks.setdefault(shard.offset[1], []).append(shard)
    for shards in blocks.values():
        borders = row_cuts(index.config, len(shards))
        for shard, (begin, end) in zip(shards, pairwise(borders), strict=True):
            shard.offset[0], shard.size[0] = begin, end - begin


def _without(options: list[ShardingOption], others: list[ShardingOption]) -> list[ShardingOption]:
    """The options of tables that have none among the others."""
    tables = {option.fqn for option in others}
    return [option for option in options if option.fqn not in tables]


def no_sharding_option(table: str, path: str, asked: str) -> ConversionError:
    """The refusal of constraints that leave a table no way to be sharded."""
    return ConversionError(
        f"table {table!r} cannot be sharded {asked} as its constraints say.",
        reason="no_sharding_option",
        module_path=path,
        what_to_do=f"allow other types ({', '.join(planned_types())}), kernel 'fused' ('dense': data_parallel) and the "
        "device_group of the topology. Types for hosts need a local_world_size that divides the world_size; types that "
        "cut rows need a row, or a bucket of a hashed table, for each rank, or empty_ranks=True.",
    )


MOST_SHARDS, FEWEST = 1_000_000, 8
"""How many tables times ranks the greedy proposals look at, and how many of these there are at least."""

MOST_MIXED = 4
"""How many plans are priced in which tables are sharded by several types."""

Proposal = Sequence[ShardingOption]
"""One option for each table."""


class Placed(NamedTuple):
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

    What the nodes of all tables together cost is in no estimate, but it depends on these types; those of the ``bound``
    tables, to which the constraints leave one, do not count. Whole tables in the order of the model are a plan as well,
    because they need no node to reorder columns. ``capacity``: the ranks with the memory that there is for tables.
    """
    ranks, partitioner = capacity.world_size, GreedyPerfPartitioner()
    times = {id(option): numpy.array(_times(option)) for option in options if _is_on_all_ranks(option)}
    best: dict[frozenset[str], tuple[float, Placed]] = {}
    seen, tried, error = set[tuple[int, ...]](), 0, None
    tables = len({option.fqn for option in options})
    for most in (max(FEWEST, MOST_SHARDS // (tables * ranks)) * factor for factor in (1, 10)):
        for proposal in proposals(options, most):
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


def proposals(options: Proposal, most: int) -> Iterator[Proposal]:
    """A greedy series of at most so many proposals; then one sharding type for all tables that have a choice."""
    ways: dict[str, list[ShardingOption]] = {}
    for option in options:
        ways.setdefault(option.fqn, []).append(option)
    yield from _greedy(list(ways.values()), most)
    for kind in dict.fromkeys(option.sharding_type for option in options):
        of_kind = [
            [one for one in of_table if one.sharding_type == kind or len({way.sharding_type for way in of_table}) == 1]
            for of_table in ways.values()
        ]
        if all(of_kind):
            yield [min(of_table, key=lambda one: max(_times(one))) for of_table in of_kind]


def _times(option: ShardingOption) -> list[float]:
    return [shard.perf.total for shard in option.shards]


def _greedy(ways: Sequence[Proposal], most: int) -> Iterator[Proposal]:
    """What TorchRec's greedy proposer proposes: the table with the largest shard takes its next option, and so on."""
    ordered = [sorted(of_table, key=lambda option: sum(_times(option))) for of_table in ways]
    heap = [(_room(of_table[0]), place) for place, of_table in enumerate(ordered)]
    heapq.heapify(heap)
    chosen = bytearray(len(ordered))
    made = [bytes(chosen)]
    while heap:
        room, place = heap[0]
        if chosen[place] + 1 == len(ordered[place]) or not any(room):
            heapq.heappop(heap)  # it has no other option, or takes no memory
            continue
        chosen[place] += 1
        heapq.heapreplace(heap, (_room(ordered[place][chosen[place]]), place))
        made.append(bytes(chosen))
    for step in made[:: -(-len(made) // most)]:
        yield [of_table[place] for of_table, place in zip(ordered, step, strict=True)]


def _room(option: ShardingOption) -> tuple[int, int]:
    """The largest memory of a shard on devices and on hosts, negated: the largest first."""
    storages: list[Any] = [shard.storage for shard in option.shards]
    return -max(storage.hbm for storage in storages), -max(storage.ddr for storage in storages)


def in_order(plan: Proposal, capacity: Topology) -> Placed | None:
    """Whole tables in this order, rank by rank, each rank with its share of the work; None if they do not fit."""
    world_size, left = capacity.world_size, [device.storage for device in capacity.devices]
    times = [option.shards[0].perf.total for option in plan]
    share, ends = (sum(times) or 1.0) / world_size, accumulate(times)
    ranks = [min(int((end - time / 2) / share), world_size - 1) for end, time in zip(ends, times, strict=True)]
    for option, rank in zip(plan, ranks, strict=True):
        if not option.shards[0].storage.fits_in(left[rank]):
            return None
        left[rank] -= option.shards[0].storage
    return None if world_size == 1 else Placed(plan, [[rank] for rank in ranks])
