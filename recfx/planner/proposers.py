"""TorchRec's proposers; of those that make thousands of proposals, only some are tried."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Storage, Topology

MOST_SHARDS = 1_000_000
"""How many tables times ranks a greedy proposer looks at, counted once per proposal."""

FEWEST = 8
"""How many proposals it makes at least, if it has so many."""


class GreedySteps(GreedyProposer):
    """TorchRec's greedy proposals without those that cannot fit, whatever is put where; of more than ``most``, as many
    at equal distances.
    """

    def __init__(self, use_depth: bool, capacity: Storage, most: int) -> None:
        super().__init__(use_depth=use_depth)
        self._capacity, self._most = capacity, most
        self._path: list[str] = []
        self._pending: list[int] = []
        self.left_out = 0

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        super().load(search_space, enumerator)
        self._path = self._steps()
        fitting = self._that_may_fit() or [0]  # one, for TorchRec's own text about what does not fit
        self._pending = fitting[:: -(-len(fitting) // self._most)]
        self.left_out = len(fitting) - len(self._pending)

    def propose(self) -> list[ShardingOption] | None:
        if not self._pending or not self._sharding_options_by_fqn:
            return None
        chosen = dict.fromkeys(self._sharding_options_by_fqn, 0)
        for table in self._path[: self._pending[0]]:
            chosen[table] += 1
        return [self._sharding_options_by_fqn[table][index] for table, index in chosen.items()]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        del self._pending[0]

    def _steps(self) -> list[str]:
        """Which table takes its next option, step by step: the one whose shards take most storage now."""
        sizes = {
            table: [tuple(-size for size in _storage(option)) for option in options]
            for table, options in self._sharding_options_by_fqn.items()
        }
        heap = [(storages[0], place, table, 0) for place, (table, storages) in enumerate(sizes.items())]
        heapq.heapify(heap)
        path = []
        while heap:
            size, place, table, index = heapq.heappop(heap)
            if index + 1 < len(sizes[table]) and any(size):
                path.append(table)
                heapq.heappush(heap, (sizes[table][index + 1], place, table, index + 1))
        return path

    def _that_may_fit(self) -> list[int]:
        """How many steps may be taken, so that the tables take no more memory than there is."""
        sizes = {
            table: [(option.total_storage.hbm, option.total_storage.ddr) for option in options]
            for table, options in self._sharding_options_by_fqn.items()
        }
        hbm, ddr = (sum(of_table[0][kind] for of_table in sizes.values()) for kind in (0, 1))
        chosen, fitting = dict.fromkeys(sizes, 0), []
        for step, table in enumerate(["", *self._path]):
            if table:
                before, after = sizes[table][chosen[table] : chosen[table] + 2]
                chosen[table] += 1
                hbm, ddr = hbm + after[0] - before[0], ddr + after[1] - before[1]
            if hbm <= self._capacity.hbm and ddr <= self._capacity.ddr:
                fitting.append(step)
        return fitting


class UniformWhereFree(UniformProposer):
    """TorchRec's uniform proposals, of one sharding type each, for the tables that have a choice. Those that a
    constraint leaves one type keep that: TorchRec would propose nothing but this type for all tables.
    """

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        bound = _bound_to_one_type(search_space)
        free = [option for option in search_space if option.fqn not in bound]
        super().load(free or search_space, enumerator)
        if free:
            for group in self._grouped_sharding_options:
                group += bound.values()


def _bound_to_one_type(search_space: Sequence[ShardingOption]) -> dict[str, ShardingOption]:
    """The best option of each table that has options of one sharding type only, if other tables have more."""
    of_tables: dict[str, list[ShardingOption]] = {}
    for option in search_space:
        of_tables.setdefault(option.fqn, []).append(option)
    return {
        fqn: min(options, key=lambda option: max(shard.perf.total if shard.perf else 0 for shard in option.shards))
        for fqn, options in of_tables.items()
        if len({option.sharding_type for option in options}) == 1
    }


def _storage(option: ShardingOption) -> tuple[float, ...]:
    """What ``GreedyProposer`` compares tables by."""
    storages: list[Any] = [shard.storage for shard in option.shards]
    hbm, ddr = [storage.hbm for storage in storages], [storage.ddr for storage in storages]
    return max(hbm), sum(hbm), max(ddr), sum(ddr)


def proposers(topology: Topology, tables: int, times: int = 1) -> list[Proposer]:
    """The proposers that TorchRec's planner has by default, with ``times`` as many greedy proposals as usual."""
    storages = [device.storage for device in topology.devices]
    capacity = Storage(sum(storage.hbm for storage in storages), sum(storage.ddr for storage in storages))
    most = times * max(FEWEST, MOST_SHARDS // max(1, tables * topology.world_size))
    greedy = [GreedySteps(use_depth, capacity, most) for use_depth in (True, False)]
    return [GridSearchProposer(), *greedy, UniformWhereFree()]


def left_out(made: Sequence[Proposer]) -> int:
    """How many of TorchRec's proposals were not made."""
    return sum(proposer.left_out for proposer in made if isinstance(proposer, GreedySteps))
