"""The live objects that the nodes of one collection's graph work on. Passes do not hold them."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.nodes.dist_groups import DistGroups
from recfx.nodes.table_store import TableStore


@dataclass(frozen=True)
class Resources:
    """The unexpanded collection holds them, and passes give them to the modules of the nodes that they add.

    Args:
        store: weights, indexes and fused optimizers.
        groups: the process groups of a sharded collection.
    """

    store: TableStore
    groups: DistGroups | None = None
