"""TorchRec's proposers, and one more; of those that make thousands of proposals, only some are priced.

``GreedyProposer`` changes the sharding of one table per proposal, and the time to price one grows with the number of
tables: for a thousand tables, it would take many minutes to price them all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Storage, Topology
from torchrec.distributed.types import ShardingType

from recfx.planner.planned_option import PlannedOption

MOST_TABLES = 60_000
"""How many tables, counted once per proposal, a greedy proposer prices on eight ranks: 60 proposals for a thousand."""

MOST_TABLES_THAT_FIT = 10 * MOST_TABLES
"""How many tables it prices if none of these proposals fits into memory."""

FEWEST = 40
"""How many proposals it makes at least, unless tables times ranks are a hundred thousand or more."""

MOST_PLACES = 4_000_000
"""How many tables times ranks, counted once per proposal, it looks at for the sake of ``FEWEST``."""

FEWEST_OF_ALL = 8
"""How many proposals it makes at least, however many tables and ranks there are."""


class GreedySteps(GreedyProposer):
    """TorchRec's greedy proposals without those that cannot fit, whatever is put where. If they have more than
    ``most_tables`` tables together, they are some of them at equal distances, and more around the best of these.
    ``made`` of ``total`` have been made.
    """

    def __init__(self, use_depth: bool, capacity: Storage, most_tables: int, ranks: int = 1) -> None:
        super().__init__(use_depth=use_depth)
        self._capacity, self._most_tables, self._ranks = capacity, most_tables, ranks
        self._path: list[str] = []
        self._fitting: list[int] = []
        self._pending: list[int] = []
        self._ratings: dict[int, float] = {}
        self._distance = 1
        self.made = self.total = 0

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        super().load(search_space, enumerator)
        self._path = self._steps()
        self._fitting = self._that_may_fit() or [0]  # one, for TorchRec's own text about what does not fit
        self.total, self.made, self._ratings = len(self._fitting), 0, {}
        tables = max(len(self._sharding_options_by_fqn), 1)
        fewest = min(FEWEST, max(FEWEST_OF_ALL, MOST_PLACES // (tables * self._ranks)))
        most = max(self._most_tables // tables, fewest)
        self._distance = -(-self.total // most)
        self._pending = list(range(0, self.total, self._distance))

    def propose(self) -> list[ShardingOption] | None:
        if not self._pending or not self._sharding_options_by_fqn:
            return None
        chosen = dict.fromkeys(self._sharding_options_by_fqn, 0)
        for table in self._path[: self._fitting[self._pending[0]]]:
            chosen[table] += 1
        return [self._sharding_options_by_fqn[table][index] for table, index in chosen.items()]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        self.made += 1
        self._ratings[self._pending.pop(0)] = float("inf") if perf_rating is None else perf_rating
        while not self._pending and self._distance > 1:
            self._distance = (self._distance + 1) // 2 if self._distance > 2 else 1
            best = min(self._ratings, key=self._ratings.__getitem__)
            around = (best - self._distance, best + self._distance)
            self._pending = [number for number in around if 0 <= number < self.total and number not in self._ratings]

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
        """The numbers of the steps whose tables take no more memory than there is."""
        sizes = {
            table: [option.total_storage for option in options]
            for table, options in self._sharding_options_by_fqn.items()
        }
        hbm, ddr = (sum(getattr(storages[0], kind) for storages in sizes.values()) for kind in ("hbm", "ddr"))
        chosen, fitting = dict.fromkeys(sizes, 0), []
        for step, table in enumerate(["", *self._path]):
            if table:
                before, after = sizes[table][chosen[table] : chosen[table] + 2]
                chosen[table] += 1
                hbm, ddr = hbm + after.hbm - before.hbm, ddr + after.ddr - before.ddr
            if hbm <= self._capacity.hbm and ddr <= self._capacity.ddr:
                fitting.append(step)
        return fitting


class UniformWhereFree(UniformProposer):
    """TorchRec's uniform proposals, of one sharding type each, for the tables that have a choice. Those that a
    constraint leaves one type keep that: TorchRec would propose nothing but this type for all tables.
    """

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        bound = bound_to_one_type(search_space)
        free = [option for option in search_space if option.fqn not in bound]
        super().load(free or search_space, enumerator)
        if free:
            for group in self._grouped_sharding_options:
                group += bound.values()


class TablesInOrder(Proposer):
    """Proposes whole tables in the order of the model, rank by rank: ids and pooled rows then travel in the order of
    the keys, and nothing has to put them into it. Tables that a constraint leaves another sharding type have that.
    """

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        whole: dict[str, PlannedOption] = {}
        for option in search_space:
            if isinstance(option, PlannedOption) and option.sharding_type == ShardingType.TABLE_WISE.value:
                known = whole.setdefault(option.fqn, option)
                if option.shards[0].perf.total < known.shards[0].perf.total:
                    whole[option.fqn] = option
        bound = {fqn: option for fqn, option in bound_to_one_type(search_space).items() if fqn not in whole}
        self._proposal: list[ShardingOption] | None = None
        if len(whole) + len(bound) == len({option.fqn for option in search_space}):
            self._proposal = [*(option.in_order() for option in whole.values()), *bound.values()]

    def propose(self) -> list[ShardingOption] | None:
        return self._proposal

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        self._proposal = None


def bound_to_one_type(search_space: Sequence[ShardingOption]) -> dict[str, ShardingOption]:
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


def proposers(topology: Topology, most_tables: int = MOST_TABLES) -> list[Proposer]:
    """The proposers that TorchRec's planner has by default, in its order, and one more."""
    storages = [device.storage for device in topology.devices]
    capacity = Storage(sum(storage.hbm for storage in storages), sum(storage.ddr for storage in storages))
    most = most_tables * 8 // max(topology.world_size, 8)  # with more ranks, a proposal takes more time
    greedy = [GreedySteps(use_depth, capacity, most, topology.world_size) for use_depth in (True, False)]
    return [GridSearchProposer(), *greedy, UniformWhereFree(), TablesInOrder()]


def left_out(made: Sequence[Proposer]) -> int:
    """How many of TorchRec's proposals were not made."""
    return sum(proposer.total - proposer.made for proposer in made if isinstance(proposer, GreedySteps))
