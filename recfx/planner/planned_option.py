"""Sharding options that are cheap for thousands of tables and ranks, and the partitioner that knows them.

TorchRec's planner hashes, copies and adds up all shards of all options for each plan that it tries.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import astuple
from functools import cached_property
from typing import Any

import numpy
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    PartitionByType,
    Perf,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)


class CopiedShard(Shard):
    """A shard whose copies share its estimates, which nobody changes."""

    def __deepcopy__(self, memo: object) -> CopiedShard:
        return CopiedShard([*self.size], [*self.offset], self.storage, self.perf, self.rank)


class PlacedShard(Shard):
    """A shard of a table that is on all ranks in turn: its first rank is its only one, whatever is set later."""

    @property
    def rank(self) -> int | None:
        return self._rank

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._rank = self.__dict__.get("_rank", rank)


class PlannedOption(ShardingOption):
    """TorchRec's option with final estimates, one for all shards of a size. Copies share the shards of a table that is
    on all ranks, because these have one rank each.
    """

    shards: Sequence[Shard]
    kinds: list[Shard]
    """A shard of each size, in the order in which they come first."""
    kind_of_shard: list[int]
    """For each shard, the place of its size in ``kinds``."""
    is_on_all_ranks: bool
    """Whether shard ``n`` is on rank ``n``."""

    @classmethod
    def of(cls, option: ShardingOption, shards: Sequence[Shard]) -> PlannedOption:
        """``option`` with its estimates of one shard of each size; ``shards`` are all its shards, without estimates."""
        planned = cls.__new__(cls)
        planned.__dict__.update(vars(option))
        known = {tuple(shard.size): number for number, shard in enumerate(option.shards)}
        planned.kinds, planned.kind_of_shard = list(option.shards), [known[tuple(shard.size)] for shard in shards]
        planned.is_on_all_ranks = option.partition_by == PartitionByType.UNIFORM.value
        estimates = [planned.kinds[number] for number in planned.kind_of_shard]
        planned.shards = [
            PlacedShard(shard.size, shard.offset, like.storage, like.perf, rank)
            if planned.is_on_all_ranks
            else CopiedShard(shard.size, shard.offset, like.storage, like.perf)
            for rank, (shard, like) in enumerate(zip(shards, estimates, strict=True))
        ]
        return planned

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.fqn, self.sharding_type, self.compute_kernel))

    def __eq__(self, other: object) -> bool:
        return self is other

    @cached_property
    def total_storage(self) -> Storage:
        return ShardingOption.total_storage.fget(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedOption:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(vars(self))
        if not self.is_on_all_ranks:
            copied.shards = [shard.__deepcopy__(memo) for shard in self.shards]
        return copied


class QuickPartitioner(GreedyPerfPartitioner):
    """TorchRec's partitioner. It adds up the shards of tables that are on all ranks one by one; here they are arrays.

    ``capacity`` has the memory of the ranks, as the last proposal was given it.
    """

    capacity: Topology

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology, *more: Any) -> Any:
        """The proposal with the rank of every shard; raises TorchRec's ``PlannerError`` if it does not fit."""
        self.capacity = storage_constraint
        on_all: list[PlannedOption] = []
        rest: list[ShardingOption] = []
        for option in proposal:
            is_on_all = isinstance(option, PlannedOption) and option.is_on_all_ranks
            on_all.append(option) if is_on_all else rest.append(option)
        super().partition(rest, _without(on_all, storage_constraint), *more)
        return proposal


def _without(on_all: list[PlannedOption], topology: Topology) -> Topology:
    """The topology with what these tables leave on each rank."""
    taken, seconds = numpy.zeros((3, topology.world_size), dtype=int), numpy.zeros(topology.world_size)
    for option in on_all:
        if len(option.shards) != topology.world_size:
            raise _error(f"{option.name} has {len(option.shards)} shards for {topology.world_size} ranks")
        taken += numpy.array([astuple(kind.storage) for kind in option.kinds]).T[:, option.kind_of_shard]
        seconds += numpy.array([kind.perf.total for kind in option.kinds])[option.kind_of_shard]
    left = copy.deepcopy(topology)
    for device, amounts, busy in zip(left.devices, taken.T.tolist(), seconds.tolist(), strict=True):
        storage = Storage(*amounts)
        if not storage.fits_in(device.storage):
            raise _error(f"the tables that are on all ranks do not fit on rank {device.rank}")
        device.storage -= storage
        device.perf += Perf(busy, 0.0, 0.0, 0.0)
    return left


def _error(message: str) -> PlannerError:
    return PlannerError(message, PlannerErrorType.PARTITION)
