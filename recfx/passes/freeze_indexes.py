"""freeze_indexes: ids are found in indexes that no longer change, so nothing is inserted, evicted or in flight.

``hash_ids`` becomes ``find_rows``. A MEAN that ran as SUM because of hashing becomes a MEAN again if all tables of its
lookup are, because rows of -1 stay in their bags here, where they count in the length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from recfx.ir.typed_access import find_module, meta_of, node_module
from recfx.nodes import HashIds, Lookup, MeanDivide
from recfx.passes._nodes import add_node, nodes_of_kind, remove_node, replace_inputs
from recfx.passes.base import PassResult
from recfx.serving import SCRIPT, FrozenIndex, ServingTarget


@dataclass(frozen=True)
class FreezeIndexes:
    """Replace ``hash_ids`` and what follows from it.

    Args:
        indexes: the frozen index of each table that has one, by collection and table.
        target: says which module finds rows.
    """

    indexes: Mapping[str, Mapping[str, FrozenIndex]] = field(default_factory=dict)
    target: ServingTarget = SCRIPT
    name: str = "freeze_indexes"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        found = nodes_of_kind(graph_module, "hash_ids")
        for hash_ids in found:
            self._freeze(graph_module, hash_ids)
        self._restore_means(graph_module)
        return PassResult(graph_module, modified=bool(found))

    def _freeze(self, graph_module: fx.GraphModule, hash_ids: fx.Node) -> None:
        module, meta = node_module(graph_module, hash_ids, HashIds), meta_of(hash_ids)
        find = self.target.find(module.tables, dict(self.indexes[meta.collection]))
        with graph_module.graph.inserting_before(hash_ids):
            ids = hash_ids.all_input_nodes[0]
            rows = add_node(graph_module, "find_rows", find, (ids,), meta, module.tables, self.name, meta.shape)
        items = [user for user in hash_ids.users if user.op == "call_function"]
        for lookup in nodes_of_kind(graph_module, "lookup"):
            if hash_ids in lookup.all_input_nodes or any(item in lookup.all_input_nodes for item in items):
                lookup.args = (rows,)
        for node in [*items, hash_ids]:
            remove_node(graph_module, node)

    def _restore_means(self, graph_module: fx.GraphModule) -> None:
        restored: dict[fx.Node, fx.Node] = {}
        for node in nodes_of_kind(graph_module, "mean_divide"):
            divide, pooled = node_module(graph_module, node, MeanDivide), node.all_input_nodes[0]
            lookup = find_module(graph_module, pooled)
            if isinstance(lookup, Lookup) and all(table.name in divide.divided for table in lookup.tables):
                lookup.pooling = "MEAN"
                restored[node] = pooled
        replace_inputs(restored)
        for node in restored:
            remove_node(graph_module, node)
