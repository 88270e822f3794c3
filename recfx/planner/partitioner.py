"""Places the shards of a proposal as TorchRec's greedy partitioner does, in the time that thousands of ranks allow."""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import numpy
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    PartitionByType,
    Perf,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ShardingType

from recfx.planner.planned_option import PlannedOption
from recfx.versions.differences import ranks_of_host


class QuickPartitioner(GreedyPerfPartitioner):
    """TorchRec's partitioner for :class:`PlannedOption`: every shard gets the rank that TorchRec gives it.

    TorchRec adds the shards of a table on all ranks one by one, sorts all hosts for every table that is put on one, and
    copies the devices of each. Here the former are added as arrays, and ranks and hosts wait in heaps. Towers, whose
    tables have to be together, and tables on SSDs are left to TorchRec.
    """

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology, *more: Any) -> Any:
        """The proposal with the rank of every shard; raises TorchRec's ``PlannerError`` if it does not fit."""
        options = [option for option in proposal if isinstance(option, PlannedOption)]
        special = EmbeddingComputeKernel.KEY_VALUE.value
        if len(options) < len(proposal) or any(one.dependency or one.compute_kernel == special for one in options):
            return super().partition(proposal, storage_constraint, *more)
        ranks = _Ranks(storage_constraint, [option for option in options if option.is_on_all_ranks])
        rest = [option for option in options if not option.is_on_all_ranks]
        if rest and all(option.keeps_order for option in rest):
            ranks.place_in_order(rest)
            return proposal
        for option in sorted(rest, key=_largest_first):
            if option.partition_by == PartitionByType.DEVICE.value:
                ranks.place_anywhere(option)
            else:
                ranks.place_on_hosts(option)
        return proposal


def _largest_first(option: PlannedOption) -> tuple[int, ...]:
    return tuple(-amount for amount in astuple(option.total_storage))


class _Ranks:
    """What is free on every rank, and the time of what is there; ranks and hosts are taken in the order of it."""

    def __init__(self, topology: Topology, on_all: list[PlannedOption]) -> None:
        devices, self._local = topology.devices, ranks_of_host(topology)
        self._ranks_per_host = topology.local_world_size
        free = numpy.array([astuple(device.storage) for device in devices]).T
        times = numpy.array([astuple(device.perf) for device in devices], dtype=float).T
        for option in on_all:
            if len(option.shards) != len(devices):
                raise _error(f"{option.name} has {len(option.shards)} shards for {len(devices)} ranks")
            kinds = option.kind_of_shard if len(option.kinds) > 1 else [0]
            free = free - numpy.array([astuple(kind.storage) for kind in option.kinds]).T[:, kinds]
            times += numpy.array([astuple(kind.perf) for kind in option.kinds]).T[:, kinds]
        if (free < 0).any():
            raise _error("the tables that are on all ranks do not fit on a rank")
        self.free = [Storage(*amounts) for amounts in free.T.tolist()]
        self.times = [Perf(*parts) for parts in times.T.tolist()]
        self._changes = [0] * len(devices)
        self._heap = [self._entry(rank) for rank in range(len(devices))]
        heapq.heapify(self._heap)
        self._host_changes = [0] * (len(devices) // self._local)
        self._changed_hosts = set(range(len(self._host_changes)))
        self._hosts: list[tuple[float, int, int]] = []

    def place_anywhere(self, option: PlannedOption) -> None:
        """Every shard on the rank with least to do among those on which it fits."""
        for shard in option.shards:
            passed = []
            while self._heap:
                entry = heapq.heappop(self._heap)
                if entry[-1] != self._changes[entry[2]]:
                    continue  # the rank has another entry by now
                if shard.storage.fits_in(self.free[entry[2]]):
                    break
                passed.append(entry)
            else:
                raise _error(f"no rank has room for a shard of {option.name}: {shard.storage}")
            for other in passed:
                heapq.heappush(self._heap, other)
            shard.rank = entry[2]
            self._set(entry[2], self.free[entry[2]] - shard.storage, self.times[entry[2]] + shard.perf)

    def place_in_order(self, options: list[PlannedOption]) -> None:
        """Whole tables, rank by rank, so that the rank with most to do has as little to do as that allows."""
        times = [option.shards[0].perf.total for option in options]
        low, high = max(times), sum(times) + max(time.total for time in self.times)
        ranks = self._in_order(options, low)
        if ranks is not None:
            high = low
        elif (ranks := self._in_order(options, high)) is None:
            raise _error("the tables do not fit on the ranks in their order")
        while high > low * 1.01:
            middle = (low + high) / 2
            better = self._in_order(options, middle)
            low, high, ranks = (middle, high, ranks) if better is None else (low, middle, better)
        for option, rank in zip(options, ranks, strict=True):
            option.shards[0].rank = rank

    def _in_order(self, options: list[PlannedOption], most: float) -> list[int] | None:
        """The rank of each table, if no rank works longer than ``most`` and no more tables share a rank than have to;
        None if they do not fit.
        """
        ranks: list[int] = []
        rank, free, time = 0, self.free[0], self.times[0].total
        for place, option in enumerate(options):
            needed, seconds = option.shards[0].storage, option.shards[0].perf.total
            spare = len(self.free) - rank - 1 >= len(options) - place and rank in ranks[-1:]
            while spare or time + seconds > most or not needed.fits_in(free):
                rank, spare = rank + 1, False
                if rank == len(self.free):
                    return None
                free, time = self.free[rank], self.times[rank].total
            free, time = free - needed, time + seconds
            ranks.append(rank)
        return ranks

    def place_on_hosts(self, option: PlannedOption) -> None:
        """All shards on the host, or in turn on the hosts, with least to do among those on which they fit."""
        in_turn = option.sharding_type != ShardingType.TABLE_COLUMN_WISE.value
        needed, rest = divmod(len(option.shards), self._local) if in_turn else (1, 0)
        if rest or not needed:
            raise _error(f"{option.name} has {len(option.shards)} shards for hosts of {self._local} ranks")
        count, taken = len(self._host_changes), []
        for entry in self._hosts_in_order():
            taken.append(entry)
            if len(taken) < min(needed, count):
                continue
            end = max(len(taken), needed)
            hosts = [taken[place % count][1] for place in range(end - needed, end)]
            if self._place_together(option, hosts, in_turn):
                break
        else:
            raise _error(f"no host has room for {option.name}: {option.total_storage}")
        for entry in taken:
            heapq.heappush(self._hosts, entry)

    def _place_together(self, option: PlannedOption, hosts: list[int], in_turn: bool) -> bool:
        """All shards on the ranks of ``hosts``, if they fit there."""
        ranks = [rank for host in hosts for rank in range(host * self._local, (host + 1) * self._local)]
        free, times = ({rank: every[rank] for rank in ranks} for every in (self.free, self.times))
        places = []
        for number, shard in enumerate(option.shards):
            possible = ranks[number : number + 1] if in_turn else ranks
            fitting = [rank for rank in possible if shard.storage.fits_in(free[rank])]
            if not fitting:
                return False
            rank = min(fitting, key=lambda candidate: (times[candidate].total, candidate))
            free[rank], times[rank] = free[rank] - shard.storage, times[rank] + shard.perf
            places.append(rank)
        for shard, rank in zip(option.shards, places, strict=True):
            shard.rank = rank
        for rank in dict.fromkeys(places):
            self._set(rank, free[rank], times[rank])
        return True

    def _hosts_in_order(self) -> Iterator[tuple[float, int, int]]:
        """Every host, that with least to do first; it is taken from the heap."""
        for host in self._changed_hosts:
            self._host_changes[host] += 1
            totals = (time.total for time in self.times[host * self._local : (host + 1) * self._local])
            total = functools.reduce(operator.add, totals)  # Python 3.12's sum rounds otherwise
            heapq.heappush(self._hosts, (total, host, self._host_changes[host]))
        self._changed_hosts = set()
        while self._hosts:
            entry = heapq.heappop(self._hosts)
            if entry[2] == self._host_changes[entry[1]]:  # otherwise it has another entry by now
                yield entry

    def _set(self, rank: int, free: Storage, times: Perf) -> None:
        self.free[rank], self.times[rank] = free, times
        self._changes[rank] += 1
        heapq.heappush(self._heap, self._entry(rank))
        self._changed_hosts.add(rank // self._local)

    def _entry(self, rank: int) -> tuple[float, int, int, int]:
        # Ranks of equal load are taken host by host, so that no host's memory fills up first.
        return self.times[rank].total, rank % self._ranks_per_host, rank, self._changes[rank]


def _error(message: str) -> PlannerError:
    return PlannerError(message, PlannerErrorType.PARTITION)
