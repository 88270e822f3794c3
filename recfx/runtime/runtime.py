"""Everything live that the graphs of one collection work on. Passes do not see it."""

from __future__ import annotations

from torch import nn

from recfx.runtime.dist_groups import DistGroups
from recfx.runtime.output_dist import BackwardWatch
from recfx.runtime.table_store import TableStore


class Runtime:
    """What a collection's graphs for training, for evaluation and for prefetching are all lowered from.

    It keeps the modules that were made for the first of them, so that nodes of the others share their state.

    Args:
        store: weights, indexes, fused optimizers and batches in flight.
        groups: the process groups of a sharded collection.
        late_backwards: refuses backwards of a sharded collection in which tables have indexes, if they come too late.
    """

    def __init__(
        self, store: TableStore, groups: DistGroups | None = None, late_backwards: BackwardWatch | None = None
    ) -> None:
        self.store = store
        self.groups = groups
        self.late_backwards = late_backwards
        self._made: dict[str, tuple[str, nn.Module]] = {}

    def add(self, name: str, kind: str, module: nn.Module) -> None:
        """Keep what runs for a node, or for a part of a node.

        Args:
            name: of the node.
            kind: of the node, or of the node that the part would be by itself.
            module: what runs for it.
        """
        self._made[name] = kind, module

    def module(self, name: str) -> nn.Module | None:
        """What runs for the node of this name; None if nothing was made for it yet."""
        return self._made[name][1] if name in self._made else None

    def of(self, kind: str) -> list[nn.Module]:
        """What runs for the nodes of this kind, in the order of the nodes."""
        return [module for own, module in self._made.values() if own == kind]
