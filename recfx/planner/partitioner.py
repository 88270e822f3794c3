"""TorchRec's partitioner, for a million shards."""

from __future__ import annotations

import copy
from dataclasses import astuple
from typing import Any

import numpy
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    Perf,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Storage,
    Topology,
)

from recfx.planner.planned_option import PlannedOption


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
