"""What the nodes of one collection's graph work on: live objects, which passes do not hold."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.nodes.dist_groups import DistGroups
from recfx.nodes.table_store import TableStore


@dataclass(frozen=True)
class Resources:
    """The unexpanded collection brings them along; passes give them to the modules of the nodes that they add.

    Args:
        store: weights, indexes and fused optimizers.
        groups: the process groups of a sharded collection.
    """

    store: TableStore
    groups: DistGroups | None = None
