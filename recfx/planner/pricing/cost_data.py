"""What a model costs per step as data: expressions, and numbers for given batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy

from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_price import NodePrice, Totals
from recfx.planner.pricing.planned_collection import PlannedCollection
from recfx.planner.pricing.rank_totals import StepPrice
from recfx.planner.pricing.work import NodeCost, Resident

COST_VERSION = "1"


@dataclass(frozen=True)
class CostAtData:
    """The cost of a step in numbers.

    Args:
        version: the version of this schema.
        batch: samples per rank.
        world_size: the number of ranks.
        rank: the rank whose nodes these are.
        lengths: the mean number of ids per sample, by feature.
        hardware: what the times are predicted for.
        nodes: every node, in order.
        step: all ranks, if the model is sharded.
        batches: the samples of each rank, if a number was given for each; otherwise empty.
    """

    version: str
    batch: int
    world_size: int
    rank: int
    lengths: Mapping[str, float]
    hardware: Hardware
    nodes: tuple[NodePrice, ...]
    step: StepPrice | None = None
    batches: tuple[int, ...] = ()

    @cached_property
    def totals(self) -> Totals:
        """The sums over all nodes of this rank."""
        return Totals.of(self.nodes)

    @property
    def seconds(self) -> float:
        """The predicted time of a step; if there are several ranks, with their waiting for each other."""
        return self.totals.seconds if self.step is None else self.step.seconds

    @property
    def ranks(self) -> tuple[Totals, ...]:
        """The totals of every rank."""
        return (self.totals,) if self.step is None else self.step.ranks

    @property
    def imbalance(self) -> float:
        """The time of the slowest rank over the mean of all ranks, 1 if all are equal."""
        return 1.0 if self.step is None else self.step.imbalance


@dataclass(frozen=True)
class CostData:
    """What each node of a model costs per step, on one rank, in ``B``, ``W`` and ``L_<feature>``.

    Args:
        version: the version of this schema; it changes when a field changes its meaning or is removed.
        nodes: every node, in order.
        features: the features of all collections.
        world_size: the number of ranks.
        rank: the rank whose nodes these are.
        trains: whether a step has a backward.
        device: the type of the device that has the tables.
        hardware_of: gives the hardware that times are predicted for; only asked when a time is.
        planned: the sharded collections, on all ranks.
        again: gives the cost of the same model on another number of ranks, if it is not sharded already.
    """

    version: str
    nodes: tuple[NodeCost, ...]
    features: tuple[str, ...]
    world_size: int
    rank: int
    trains: bool
    device: str
    hardware_of: Callable[[], Hardware]
    planned: tuple[PlannedCollection, ...] = ()
    again: Callable[[int], Any] | None = None

    @property
    def read_bytes(self) -> sympy.Expr:
        """Bytes read from memory per step."""
        return sympy.Add(*(node.read_bytes for node in self.nodes))

    @property
    def written_bytes(self) -> sympy.Expr:
        """Bytes written to memory per step."""
        return sympy.Add(*(node.written_bytes for node in self.nodes))

    @property
    def flops(self) -> sympy.Expr:
        """Floating-point operations per step."""
        return sympy.Add(*(node.flops for node in self.nodes))

    @property
    def wire_bytes(self) -> sympy.Expr:
        """Bytes that this rank passes to collectives per step, its own part included."""
        return sympy.Add(*(node.wire_bytes for node in self.nodes))

    @property
    def resident(self) -> Resident:
        """Bytes that stay in this rank's memory between steps."""
        return sum((node.resident for node in self.nodes), Resident())

    @property
    def resident_bytes(self) -> int:
        """Their sum."""
        return self.resident.total

    def node(self, name: str) -> NodeCost:
        """The node of this name.

        Raises:
            KeyError: there is none.
        """
        return {node.name: node for node in self.nodes}[name]


def features_of(nodes: Sequence[NodeCost], planned: Sequence[PlannedCollection] = ()) -> tuple[str, ...]:
    """The features whose lengths the cost depends on, in alphabetical order.

    Args:
        nodes: of one rank.
        planned: the sharded collections, on all ranks.
    """
    symbols: set[sympy.Basic] = set()
    for node in nodes:
        for expression in (node.read_bytes, *(each.bytes for each in node.collectives)):
            symbols |= expression.free_symbols
    found = {str(symbol)[2:] for symbol in symbols if str(symbol).startswith("L_")}
    found |= {name for each in planned for table in each.tables for name in table.feature_names}
    return tuple(sorted(found))
