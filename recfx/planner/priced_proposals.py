"""Prices what TorchRec's proposers propose: a performance model for TorchRec's planner."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.types import PerfModel, ShardingOption, Topology

from recfx.collections.collection import UnshardedCollection
from recfx.collections.sharding.plan import read_plan
from recfx.ir.shards import CollectionSharding
from recfx.planner.priced_plan import PlanPrice, Pricing
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_price import Totals, price
from recfx.planner.pricing.planned_collection import PlannedFacts, planned_facts, planned_with
from recfx.planner.pricing.planned_nodes import PlannedGraphs, PlannedTable
from recfx.planner.pricing.rank_totals import Batch, price_step
from recfx.planner.pricing.unknown_batch import LENGTH
from recfx.planner.pricing.values import Values, shares_of
from recfx.planner.pricing.work import NodeCost

OTHERS = "others"
"""The part of a step that recfx does not price."""


class PricedProposals(PerfModel):
    """Rates plans by the predicted time of a step; tables that recfx does not shard by TorchRec's own estimate."""

    def __init__(
        self,
        topology: Topology,
        collections: Mapping[str, UnshardedCollection],
        hardware: Hardware,
        device: str,
        batch_size: int,
        trains: bool,
        rest: Sequence[NodeCost],
    ) -> None:
        self._topology, self._collections, self._hardware = topology, collections, hardware
        self._device, self._batch_size, self._trains, self._rest = device, batch_size, trains, rest
        self._specs = {path: {table.name: table for table in part.tables} for path, part in collections.items()}
        self._values: Values | None = None
        self._lengths: dict[str, float] = {}
        self._tables: dict[Hashable, PlannedTable] = {}
        self._facts: dict[Hashable, PlannedFacts] = {}
        self._rated: dict[Hashable, float] = {}
        self._best: PlanPrice | None = None
        self._second: PlanPrice | None = None

    def rate(self, plan: list[ShardingOption]) -> float:
        """Milliseconds per step."""
        key = tuple(map(self._placed, plan))
        if key not in self._rated:
            price = self._price(plan)
            self._rated[key] = price.seconds
            if self._best is None or price.seconds < self._best.seconds:
                self._best, self._second = price, self._best
            elif self._second is None or price.seconds < self._second.seconds:
                self._second = price
        return self._rated[key] * 1e3

    def pricing(self, left_out: int = 0) -> Pricing | None:
        """The cheapest of the plans that were rated, and the second; None if none was."""
        if self._best is None:
            return None
        return Pricing(
            hardware=self._hardware.name,
            batch_size=self._batch_size,
            lengths=self._lengths,
            trains=self._trains,
            world_size=self._topology.world_size,
            tried=len(self._rated),
            chosen=self._best,
            runner_up=self._second,
            left_out=left_out,
        )

    def _price(self, plan: list[ShardingOption]) -> PlanPrice:
        values = self._values = self._values or self._values_of(plan)
        by_path: dict[str, dict[str, PlannedTable]] = {}
        stock_seconds = [0.0] * self._topology.world_size
        for option in plan:
            if option.path in self._collections:
                by_path.setdefault(option.path, {})[option.name] = self._table(option, values)
            else:
                for shard in option.shards:
                    stock_seconds[shard.rank] += shard.perf.total / 1e3
        graphs = [self._graphs(path, tables, values) for path, tables in by_path.items()]
        rest = Totals.of(price(node, values, self._hardware) for node in self._rest)
        parts = dict(price_step([Batch(graphs, values, rest)], self._hardware, with_residents=False).parts)
        if any(stock_seconds):
            parts[OTHERS] = max(stock_seconds)
        types = {option.fqn.lstrip("."): str(option.sharding_type) for option in plan}
        return PlanPrice(sum(parts.values()), parts, types)

    def _values_of(self, plan: list[ShardingOption]) -> Values:
        """The batch that TorchRec's constraints describe."""
        specs = [table for tables in self._specs.values() for table in tables.values()]
        lengths: dict[str, float] = {}
        for option in plan:
            if option.path in self._specs:
                features = self._specs[option.path][option.name].feature_names
                for feature, length in zip(features, option.input_lengths, strict=False):
                    lengths[feature] = max(lengths.get(feature, 0.0), float(length))
        names = [name for table in specs for name in table.feature_names]
        self._lengths = {name: lengths.get(name, float(LENGTH)) for name in names}
        names += [name for table in specs for name in table.sent_lengths]
        return Values(self._batch_size, self._topology.world_size, self._lengths, names, shares_of(specs))

    def _table(self, option: ShardingOption, values: Values) -> PlannedTable:
        key = (*self._placed(option), option.sharding_type)
        if key not in self._tables:
            collection, world_size = self._collections[option.path], self._topology.world_size
            spec = self._specs[option.path][option.name]
            parameter: Any = to_sharding_plan([option], self._topology).plan[option.path][option.name]
            sharding = read_plan((spec,), {option.name: parameter}, 0, world_size, option.path)
            kernel = (option.path, option.name, option.compute_kernel)
            if kernel not in self._facts:  # what trains a table does not depend on where it is
                self._facts[kernel] = planned_facts(collection, sharding, self._device)[option.name]
            self._tables[key] = PlannedTable(sharding.tables[0], self._facts[kernel], world_size, values.symbols)
        return self._tables[key]

    def _graphs(self, path: str, tables: Mapping[str, PlannedTable], values: Values) -> PlannedGraphs:
        ordered = {name: tables[name] for name in self._specs[path] if name in tables}
        sharded = tuple(table.sharded for table in ordered.values())
        sharding = CollectionSharding(sharded, 0, self._topology.world_size)
        facts = {name: table.known for name, table in ordered.items()}
        planned = planned_with(self._collections[path], path, sharding, facts)
        # No graphs are made, so that the user's passes do not matter.
        return PlannedGraphs(replace(planned, passes=None), values.symbols, self._trains, list(ordered.values()))

    def _placed(self, option: ShardingOption) -> tuple[Hashable, ...]:
        """What is where: a table that is cut into one piece is the same under every name for that."""
        return option.path, option.name, option.compute_kernel, option.cut, option.ranks
