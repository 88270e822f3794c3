"""Prices what TorchRec's proposers propose: a performance model for TorchRec's planner."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.types import PerfModel, ShardingOption, Topology

from recfx.collections.collection import UnshardedCollection
from recfx.collections.sharding.plan import read_plan
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.planner.priced_plan import PlanPrice, Pricing
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.planned_collection import PlannedTable, planned_of, traits_of
from recfx.planner.pricing.planned_nodes import PlannedGraphs
from recfx.planner.pricing.rank_totals import Batch, StepPrice, price_step
from recfx.planner.pricing.values import LENGTH, Values

OTHERS = "others"
"""The part of a step that recfx does not price."""


class _Known(NamedTuple):
    sharded: ShardedTable
    planned: PlannedTable


class PricedProposals(PerfModel):
    """Rates plans by the predicted time of a step.

    Tables that recfx does not shard are rated by TorchRec's own estimate.

    Args:
        topology: as TorchRec's planner has it.
        collections: the model's collections, as converted, by path.
        hardware: what times are predicted for.
        device: the type of the device that has the tables.
        batch_size: samples per rank.
        trains: whether a step has a backward.
    """

    def __init__(
        self,
        topology: Topology,
        collections: Mapping[str, UnshardedCollection],
        hardware: Hardware,
        device: str,
        batch_size: int,
        trains: bool,
    ) -> None:
        self._topology, self._collections, self._hardware = topology, collections, hardware
        self._device, self._batch_size, self._trains = device, batch_size, trains
        self._values: Values | None = None
        self._known: dict[Hashable, _Known] = {}
        self._places: dict[str, dict[str, int]] = {}
        self._rated: dict[Hashable, float] = {}
        self._best: PlanPrice | None = None
        self._second: PlanPrice | None = None

    def rate(self, plan: list[ShardingOption]) -> float:
        """Milliseconds per step."""
        key = tuple(_placed(option) for option in plan)
        if key not in self._rated:
            price = self._price(plan)
            self._rated[key] = price.seconds
            if self._best is None or price.seconds < self._best.seconds:
                self._best, self._second = price, self._best
            elif self._second is None or price.seconds < self._second.seconds:
                self._second = price
        return self._rated[key] * 1e3

    def pricing(self, left_out: int = 0) -> Pricing | None:
        """The cheapest of the plans that were rated, and the second; None if none was.

        Args:
            left_out: how many proposals were not rated, because there are too many.
        """
        if self._best is None:
            return None
        return Pricing(self._hardware.name, self._batch_size, len(self._rated), self._best, self._second, left_out)

    def _price(self, plan: list[ShardingOption]) -> PlanPrice:
        values = self._values = self._values or self._values_of(plan)
        by_path: dict[str, list[_Known]] = {}
        others = [0.0] * self._topology.world_size
        for option in plan:
            if option.path in self._collections:
                by_path.setdefault(option.path, []).append(self._table(option, values))
            else:
                for shard in option.shards:
                    others[shard.rank] += shard.perf.total / 1e3
        graphs = [self._graphs(path, tables, values) for path, tables in by_path.items()]
        step: StepPrice = price_step([Batch(graphs, values)], self._hardware, with_residents=False)
        parts = dict(step.parts)
        if any(others):
            parts[OTHERS] = max(others)
        types = {option.fqn.lstrip("."): str(option.sharding_type) for option in plan}
        return PlanPrice(sum(parts.values()), parts, types)

    def _values_of(self, plan: list[ShardingOption]) -> Values:
        """The batch that TorchRec's constraints describe."""
        lengths: dict[str, float] = {}
        for option in plan:
            collection = self._collections.get(option.path)
            if collection is None:
                continue
            spec = next(table for table in collection.tables if table.name == option.name)
            for feature, length in zip(spec.feature_names, option.input_lengths, strict=False):
                lengths[feature] = max(lengths.get(feature, 0.0), float(length))
        features = [
            name for each in self._collections.values() for table in each.tables for name in table.feature_names
        ]
        whole = {name: lengths.get(name, float(LENGTH)) for name in features}
        return Values(self._batch_size, self._topology.world_size, whole, features)

    def _table(self, option: ShardingOption, values: Values) -> _Known:
        key = _key(option)
        found = self._known.get(key)
        if found is None:
            collection, world_size = self._collections[option.path], self._topology.world_size
            spec = next(table for table in collection.tables if table.name == option.name)
            parameter: Any = to_sharding_plan([option], self._topology).plan[option.path][option.name]
            sharded = read_plan((spec,), {option.name: parameter}, 0, world_size, option.path)
            traits = traits_of(collection, sharded)[option.name]
            (table,) = sharded.tables
            found = _Known(table, PlannedTable(table, traits, world_size, values.symbols))
            self._known[key] = found
        return found

    def _graphs(self, path: str, tables: list[_Known], values: Values) -> PlannedGraphs:
        collection = self._collections[path]
        place = self._places.get(path)
        if place is None:
            place = self._places[path] = {table.name: number for number, table in enumerate(collection.tables)}
        tables = sorted(tables, key=lambda each: place[each.sharded.table.name])
        sharding = CollectionSharding(tuple(each.sharded for each in tables), 0, self._topology.world_size)
        planned = replace(planned_of(collection, path, sharding, {}), passes=None)  # of which no graphs are made
        known = [each.planned for each in tables]
        return PlannedGraphs(planned, values.symbols, self._trains, self._device, known)


def _key(option: ShardingOption) -> Hashable:
    return (*_placed(option), option.sharding_type)


def _placed(option: ShardingOption) -> tuple[Hashable, ...]:
    """What is where: a table that is cut into one piece is the same under every name for that."""
    shards = tuple((shard.rank, *shard.offset, *shard.size) for shard in option.shards)
    return option.path, option.name, option.compute_kernel, shards
