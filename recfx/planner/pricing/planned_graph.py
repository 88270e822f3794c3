"""The graph of one rank of a planned collection, as data: for any rank, device and chip, wherever this runs."""

from __future__ import annotations

from collections.abc import Hashable

from recfx.collections.compile_graph import rewritten
from recfx.ir.context import CollectionContext
from recfx.ir.facts import TableFacts
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.snapshot import Rewriting
from recfx.lowering.targets import PlannedTargets
from recfx.planner.pricing.planned_tables import PlannedCollection, exchanges_ids_on_host


def planned_graph(planned: PlannedCollection, rank: int, device: str, chip: str | None = None) -> Rewriting:
    """What the passes make of a collection on one rank.

    Args:
        planned: the collection.
        rank: the rank.
        device: the type of the device that would have the tables.
        chip: the name of the NPU whose limits its kernels would have to fit; None if none do.

    Raises:
        ConversionError: ``malformed_graph``: passes of the user's left one.
    """
    graph = OperatorGraph.of(planned_context(planned, rank, device), PlannedTargets(planned.backend, chip))
    return rewritten(graph, planned.passes)


def planned_context(planned: PlannedCollection, rank: int, device: str) -> CollectionContext:
    """What the graph of one rank would be about; the arguments are those of :func:`planned_graph`."""
    facts, groups, settings = {}, {}, dict[Hashable, int]()
    for table in planned.tables:
        traits = planned.traits[table.name]
        facts[table.name] = TableFacts(
            table.num_embeddings,
            table.embedding_dim,
            traits.dtype,
            device,
            optimizer=None if traits.fused is None else traits.fused.facts,
            is_trained=traits.is_trained,
        )
        groups[table.name] = settings.setdefault(traits.group, len(settings))
    return CollectionContext(
        name=planned.name,
        tables=planned.tables,
        facts=facts,
        kernel_groups=groups,
        is_weighted=planned.is_weighted,
        sharding=planned.seen_from(rank).sharding,
        ids_on_host=exchanges_ids_on_host(device),
        source=planned.source,
    )
