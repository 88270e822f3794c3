"""What each table costs each rank of a sharded model, for the heat map of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy

from recfx.inspect.drawing.costs import DrawnCosts
from recfx.ir.meta import mean_length
from recfx.ir.tables import Shard
from recfx.planner.pricing.formulas import formula_of
from recfx.planner.pricing.graph_prices import facts_of_shard
from recfx.planner.pricing.hardware import Constant
from recfx.planner.pricing.planned_collection import PlannedCollection
from recfx.planner.pricing.work import NO_RESIDENT, NodeCost, Resident


def drawn_shards(costs: DrawnCosts) -> Iterator[dict[str, Any]]:
    """The shards of all sharded collections, with formulas as :meth:`DrawnCosts.amounts` has them; shards of one table
    that cost their ranks the same are one item.

    ``type`` is the sharding type; ``ranks`` are ranges, each the first rank and the one after the last; ``amounts`` are
    what hashing and looking up cost, without what every node costs.
    """
    cost = costs.cost
    alone = replace(cost.hardware, node_overhead=Constant(0.0, "counted for nodes"))
    lengths = {mean_length(feature): place for place, feature in enumerate(cost.features)}
    for planned in cost.planned:
        for table in planned.sharding.tables:
            alike: dict[tuple[int, int, Resident], list[Shard]] = {}
            for shard in table.filled:
                alike.setdefault((shard.num_rows, shard.num_columns, planned.resident(shard)), []).append(shard)
            for (rows, columns, resident), group in alike.items():
                nodes = _nodes(planned, group[0], resident, cost.trains)
                amounts = [amount for node in nodes for amount in costs.amounts_of(node, alone, lengths)]
                yield {
                    "collection": planned.name,
                    "table": table.table.name,
                    "type": table.type.name,
                    "rows": rows,
                    "columns": columns,
                    "ranks": _ranges([shard.rank for shard in group]),
                    "amounts": [(name, "", formula) for name, _, formula in amounts],
                }


def _nodes(planned: PlannedCollection, shard: Shard, resident: Resident, trains: bool) -> Iterator[NodeCost]:
    """The part that one shard has in the nodes of its rank."""
    context = planned.context
    for facts in facts_of_shard(context, shard.spec, trains):
        phases, is_lookup = formula_of(facts.kind)(facts), facts.kind == "lookup"
        yield NodeCost(
            name=facts.kind,
            kind=facts.kind,
            collection=planned.name,
            tables=(shard.spec.name,),
            device=context.device,
            kernel="",
            forward=phases.forward.mapped(sympy.sympify),
            backward=phases.backward.mapped(sympy.sympify),
            collectives=(),
            resident=resident if is_lookup else NO_RESIDENT,
            calls=planned.calls,
            on_host=context.copies_ids and not is_lookup,
        )


def _ranges(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ranks as ranges; a rank that has several shards is there several times."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank:
            ranges[-1] = (ranges[-1][0], rank + 1)
        else:
            ranges.append((rank, rank + 1))
    return tuple(ranges)
