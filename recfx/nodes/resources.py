"""The live objects that the nodes of one collection's graph work on. Passes do not hold them."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.nodes.dist_groups import DistGroups
from recfx.nodes.output_dist import BackwardWatch
from recfx.nodes.table_store import TableStore


@dataclass(frozen=True)
class Resources:
    """The unexpanded collection holds them, and passes give them to the modules of the nodes that they add.

    Args:
        store: weights, indexes and fused optimizers.
        groups: the process groups of a sharded collection.
        late_backwards: refuses backwards of a sharded collection in which tables have indexes, if they come too late.
    """

    store: TableStore
    groups: DistGroups | None = None
    late_backwards: BackwardWatch | None = None
