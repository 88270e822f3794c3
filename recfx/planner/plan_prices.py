"""Prices the plans that TorchRec's planner has found as ``recfx.cost`` prices them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.types import ShardingOption, Topology

from recfx.collections.collection import UnshardedCollection
from recfx.planner.candidates import busy
from recfx.planner.priced_plan import PlanPrice, Pricing
from recfx.planner.pricing.all_ranks import price_step
from recfx.planner.pricing.graph_prices import ModelPrices
from recfx.planner.pricing.node_price import Totals, price
from recfx.planner.pricing.planned_collection import planned_by
from recfx.planner.pricing.values import Values, shares_of
from recfx.planner.pricing.work import LENGTH
from recfx.planner.topology import AnyTopology, chip_of, device_of, hardware_of

OTHERS = "others"
"""The part of a step that recfx does not price."""


class PlanPrices:
    """The prices of plans for one model on one topology; ``pod`` is the topology as TorchRec knows it."""

    def __init__(
        self,
        model: nn.Module,
        collections: Mapping[str, UnshardedCollection],
        topology: AnyTopology,
        pod: Topology,
        batch_size: int,
    ) -> None:
        self._collections, self._pod, self._batch_size = collections, pod, batch_size
        self._hardware, self._device, self._trains = hardware_of(topology), device_of(topology), model.training
        self._chip = chip_of(topology, self._device)
        self._rest = ModelPrices(model.training).rest(model, list(collections.values()), pod.world_size)

    def pricing(self, plans: Sequence[list[ShardingOption]], tried: int) -> tuple[int, Pricing]:
        """The number of the cheapest of ``plans``, and how it was chosen of so many that were tried."""
        values = self._values(plans[0])
        prices = [self._price(plan, values) for plan in plans]
        chosen = min(prices, key=lambda one: one.seconds)
        others = [one for one in prices if one != chosen]
        pricing = Pricing(
            hardware=self._hardware.name,
            batch_size=self._batch_size,
            lengths={name: float(length) for name, length in values.lengths.items()},
            trains=self._trains,
            world_size=self._pod.world_size,
            tried=max(tried, len(plans)),
            priced=len(plans),
            chosen=chosen,
            runner_up=min(others, key=lambda one: one.seconds, default=None),
        )
        return prices.index(chosen), pricing

    def _price(self, plan: list[ShardingOption], values: Values) -> PlanPrice:
        ours = [option for option in plan if option.path in self._collections]
        tables: Mapping[str, Any] = to_sharding_plan(ours, self._pod).plan
        planned = [
            planned_by(self._collections[path], of_tables, values.world, self._device, path, self._chip)
            for path, of_tables in tables.items()
        ]
        rest = Totals.of(price(node, values, self._hardware) for node in self._rest)
        parts = dict(price_step(planned, self._trains, values, self._hardware, rest).parts)
        if len(ours) < len(plan):
            others = [option for option in plan if option.path not in self._collections]
            parts[OTHERS] = float(busy(others, values.world).max()) / 1e3
        types = {option.fqn.lstrip("."): str(option.sharding_type) for option in plan}
        return PlanPrice(sum(parts.values()), parts, types)

    def _values(self, plan: list[ShardingOption]) -> Values:
        """The batch that TorchRec's constraints describe."""
        specs = {path: {table.name: table for table in part.tables} for path, part in self._collections.items()}
        lengths: dict[str, float] = {}
        for option in plan:
            features = specs[option.path][option.name].feature_names if option.path in specs else ()
            for feature, length in zip(features, option.input_lengths, strict=False):
                lengths[feature] = max(lengths.get(feature, 0.0), float(length))
        tables = [table for of_path in specs.values() for table in of_path.values()]
        lengths = {name: lengths.get(name, float(LENGTH)) for table in tables for name in table.feature_names}
        names = [*lengths, *(name for table in tables for name in table.sent_lengths)]
        return Values(self._batch_size, self._pod.world_size, lengths, names, shares_of(tables))
