"""What modules are made from: the node that each runs for, and what the graphs of a collection share."""

from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from recfx.ir.context import CollectionContext
from recfx.ir.operator_graph import OperatorGraph, attributes_in
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import Columns
from recfx.runtime.dist_groups import DistGroups
from recfx.runtime.table_store import TableStore


class Runtime:
    """What a collection's graphs for training and evaluation are lowered from: its store and, if it is sharded, its
    process groups. It keeps the modules that were made for the first graph, so that nodes of the others share their
    state.
    """

    def __init__(self, store: TableStore, groups: DistGroups | None = None) -> None:
        self.store = store
        self.groups = groups
        self._made: dict[str, tuple[str, nn.Module]] = {}

    def add(self, name: str, kind: str, module: nn.Module) -> None:
        """Keep what runs for the node of this name, or for a part of it that would be a node of this kind."""
        self._made[name] = kind, module

    def module(self, name: str) -> nn.Module | None:
        """What runs for the node of this name; None if nothing was made for it yet."""
        return self._made[name][1] if name in self._made else None

    def of(self, kind: str) -> list[Any]:
        return [module for own, module in self._made.values() if own == kind]


@dataclass(frozen=True)
class Lowered:
    """A node, and everything that its module is made from."""

    graph: OperatorGraph
    node: fx.Node
    collection: CollectionContext
    runtime_or_none: Runtime | None
    backend: str

    @property
    def runtime(self) -> Runtime:
        assert self.runtime_or_none is not None  # see ``lower_graph``
        return self.runtime_or_none

    @property
    def attributes(self) -> dict[str, Any]:
        return attributes_in(self.node)

    @property
    def sharding(self) -> CollectionSharding:
        assert self.collection.sharding is not None  # the verifier refuses such nodes elsewhere
        return self.collection.sharding

    @property
    def groups(self) -> DistGroups:
        assert self.runtime.groups is not None
        return self.runtime.groups

    @property
    def sources(self) -> list[int]:
        """For every key sent, in send order, the position of its feature in the selected KJT."""
        positions = self.collection.keys.positions
        return [positions[name] for shard in self.sharding.by_rank() for name in shard.table.embedding_names]

    @property
    def parts(self) -> list[list[Columns]]:
        """The columns of each input but the last, which is no part of the result."""
        return [self.graph.columns(node) for node in self.node.all_input_nodes[:-1]]
