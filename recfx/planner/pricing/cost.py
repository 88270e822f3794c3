"""``Cost``: what a model costs per step, as expressions; and ``CostAt``, the same in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from recfx.errors import ConversionError, InputError
from recfx.planner.pricing.comparison import Sweep
from recfx.planner.pricing.cost_data import CostAtData, CostData
from recfx.planner.pricing.cost_json import cost_at_json, cost_json
from recfx.planner.pricing.cost_text import cost_at_text, cost_text
from recfx.planner.pricing.graph_prices import DENSE
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_price import Totals, price
from recfx.planner.pricing.planned_nodes import PlannedGraphs
from recfx.planner.pricing.rank_totals import Batch, price_step
from recfx.planner.pricing.values import BATCH_SIZE, LENGTH, Values, is_per_rank


@dataclass(frozen=True)
class CostAt(CostAtData):
    """The cost of a step in numbers. ``str()`` is a table for a terminal. The base class has the fields."""

    def __str__(self) -> str:
        return cost_at_text(self)

    def to_json(self) -> str:
        """Everything, with the totals; keys are in the order of the fields."""
        return cost_at_json(self)


@dataclass(frozen=True)
class Cost(CostData):
    """What each node of a model costs per step. ``str()`` is for a terminal. The base class has the fields."""

    def at(self, B: int | Sequence[int] = BATCH_SIZE, W: int | None = None, L: Any = LENGTH) -> CostAt:
        """The cost in numbers.

        Args:
            B: samples per rank; or, where ranks have batches of different sizes, a list with the size of each.
            W: the number of ranks. Default: those that the cost is for. For any other number, a model that is not
                sharded yet is planned anew, as ``recfx.plan`` does.
            L: the mean number of ids per sample: a number for all features, or a mapping with one for each; or a list
                of these, one per rank.

        Raises:
            InputError: ``invalid_argument``, ``missing_feature``.
            ConversionError: ``already_sharded``, and those of ``recfx.plan``.
        """
        if W is not None and Values(1, W, 0, ()).world != self.world_size:
            return self._on(W).at(B, L=L)
        hardware = self.hardware_of()
        if is_per_rank(B) or is_per_rank(L):
            ranks = Values.of_ranks(B, L, self.features, self.world_size)
            values = ranks[self.rank]
        else:
            values = Values(B, self.world_size, L, self.features)
            ranks = [values]
        nodes = tuple(price(node, values, hardware) for node in self.nodes)
        step = price_step([self._batch(each, hardware) for each in ranks], hardware) if self.planned else None
        return CostAt(
            version=self.version,
            batch=values.batch,
            batches=values.sizes,
            world_size=values.world,
            rank=self.rank,
            lengths={name: float(length) for name, length in values.lengths.items()},
            hardware=hardware,
            nodes=nodes,
            step=step,
        )

    def _batch(self, values: Values, hardware: Hardware) -> Batch:
        graphs = [PlannedGraphs(each, values.symbols, self.trains, self.device) for each in self.planned]
        sharded = {each.name for each in self.planned}
        rest = [node for node in self.nodes if node.kind == DENSE or node.collection not in sharded]
        return Batch(graphs, values, Totals.of(price(node, values, hardware) for node in rest))

    def sweep(self, W: Iterable[int], *, B: int = BATCH_SIZE, L: Any = LENGTH) -> Sweep:
        """The cost on several numbers of ranks; the other arguments and errors are those of :meth:`at`."""
        if not isinstance(W, Iterable) or not (W := list(W)):
            raise InputError(
                f"W is {W!r}.",
                reason="invalid_argument",
                what_to_do="pass the numbers of ranks as a list, such as [8, 64, 1024].",
            )
        return Sweep(tuple(self.at(B, world_size, L) for world_size in W))

    def _on(self, world_size: int) -> Cost:
        if self.again is None:
            raise ConversionError(
                f"this is the cost on {self.world_size} ranks of a model that is already sharded, of a graph, or of "
                f"hardware without links between hosts; it says nothing about {world_size} ranks.",
                reason="already_sharded",
                what_to_do="pass the model before it is sharded, with a topology.",
            )
        found: Cost = self.again(world_size)
        return found

    def __str__(self) -> str:
        return cost_text(self)

    def to_json(self) -> str:
        """Everything; keys are in the order of the fields, and expressions are text."""
        return cost_json(self)
