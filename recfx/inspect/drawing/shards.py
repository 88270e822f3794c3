"""What each table costs each rank of a sharded model, for the heat map of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from recfx.inspect.drawing.costs import Amount, DrawnCosts
from recfx.ir.meta import mean_length
from recfx.planner.pricing.formulas import formula_of
from recfx.planner.pricing.hardware import Constant
from recfx.planner.pricing.node_facts import SYMBOLS, NodeFacts
from recfx.planner.pricing.planned_collection import PlannedCollection, PlannedFacts
from recfx.planner.pricing.planned_nodes import PlannedTable, ShardOnRank
from recfx.planner.pricing.work import NO_RESIDENT, NodeCost, Resident


@dataclass(frozen=True)
class DrawnShards:
    """Shards of one table that cost their ranks the same."""

    collection: str
    table: str
    type: str  # the sharding type
    rows: int
    columns: int
    ranks: tuple[tuple[int, int], ...]  # ranges: the first rank, and the one after the last
    amounts: tuple[Amount, ...]  # what hashing and looking up cost, without what every node costs


def drawn_shards(costs: DrawnCosts) -> Iterator[DrawnShards]:
    """The shards of all sharded collections, with formulas as :meth:`DrawnCosts.amounts` has them."""
    cost, hardware = costs.cost, costs.hardware
    alone = None if hardware is None else replace(hardware, node_overhead=Constant(0.0, "counted for nodes"))
    lengths = {mean_length(feature): place for place, feature in enumerate(cost.features)}
    for planned in cost.planned:
        facts, groups = planned.context.facts, planned.context.kernel_groups
        for sharded in planned.sharding.tables:
            name = sharded.table.name
            table = PlannedTable(sharded, PlannedFacts(facts[name], groups[name]), cost.world_size, SYMBOLS)
            alike: dict[tuple[int, Resident], list[ShardOnRank]] = {}
            for shards in table.on_rank.values():
                for on_rank in shards:
                    alike.setdefault((id(on_rank.load), table.resident(on_rank.shard)), []).append(on_rank)
            for (_, resident), group in alike.items():
                nodes = _nodes(planned, group[0], resident, cost.trains)
                amounts = tuple(amount for node in nodes for amount in costs.amounts_of(node, alone, lengths))
                rows, columns = group[0].shard.num_rows, group[0].shard.num_columns
                ranks = _ranges([on_rank.shard.rank for on_rank in group])
                yield DrawnShards(planned.name, name, sharded.type.name, rows, columns, ranks, amounts)


def _nodes(planned: PlannedCollection, on_rank: ShardOnRank, resident: Resident, trains: bool) -> list[NodeCost]:
    """The part that one shard has in the nodes of its rank."""
    context, load, nodes = planned.context, on_rank.load, []
    for kind in ("lookup", "hash_ids") if on_rank.table.table.has_index else ("lookup",):
        facts = NodeFacts(
            kind,
            (load,),
            load.ids,
            load.bags,
            is_weighted=context.is_weighted,
            is_pooled=context.is_pooled,
            trains=trains,
        )
        phases, is_lookup = formula_of(kind)(facts), kind == "lookup"
        nodes.append(
            NodeCost(
                name=kind,
                kind=kind,
                collection=planned.name,
                tables=(load.spec.name,),
                device=context.device,
                kernel="",
                forward=phases.forward.symbolic(),
                backward=phases.backward.symbolic(),
                collectives=(),
                resident=resident if is_lookup else NO_RESIDENT,
                calls=planned.calls,
                on_host=context.copies_ids and not is_lookup,
            )
        )
    return nodes


def _ranges(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ranks as ranges; a rank that has several shards is there several times."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank:
            ranges[-1] = (ranges[-1][0], rank + 1)
        else:
            ranges.append((rank, rank + 1))
    return tuple(ranges)
