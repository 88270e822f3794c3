"""insert_transfers: the copies between the host, which hashes, and the device of the tables become nodes.

Indexes are always on the host. If the tables are on another device, ids are copied to the host before they are hashed
(``to_host``), and their rows to the device before they are looked up (``to_device``). If ranks exchange ids on the
host, they are copied before they are sent. The pass leaves a collection alone whose tables are on the host as well.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

from torch import fx

from recfx.ir.meta import annotate
from recfx.ir.typed_access import meta_of, node_module
from recfx.nodes import HashIds, SelectFeatures, TableStore, ToDevice, ToHost
from recfx.nodes.host_copies import crosses
from recfx.passes._nodes import add_node, nodes_of_kind, replace_inputs, resources_of
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class InsertTransfers:
    """Insert ``to_host`` before ``hash_ids``, or before ids are sent, and ``to_device`` after ``hash_ids``."""

    name: str = "insert_transfers"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        modified = False
        for node in nodes_of_kind(graph_module, "hash_ids"):
            module, meta = node_module(graph_module, node, HashIds), meta_of(node)
            resources = resources_of(graph_module, meta.collection)
            if not crosses(resources.store.device, module.indexes.device):
                continue
            if resources.groups is not None and resources.groups.ids_on_host:
                self._before_sending(graph_module, meta.collection)
            else:
                self._before_hashing(graph_module, node, module)
            self._after_hashing(graph_module, node, module, resources.store)
            annotate(node, replace(meta, device="cpu"))
            modified = True
        return PassResult(graph_module, modified)

    def _before_hashing(self, graph_module: fx.GraphModule, hash_ids: fx.Node, module: HashIds) -> None:
        """The bags stay on the device, because hashing only needs to know how many ids each key has."""
        (ids,), meta = hash_ids.all_input_nodes, meta_of(hash_ids)
        with graph_module.graph.inserting_before(hash_ids):
            copy = add_node(graph_module, "to_host", ToHost(), (ids,), meta, module.tables, self.name, meta.shape)
        annotate(copy, replace(meta_of(copy), device="cpu"))
        hash_ids.args = (copy,)

    def _before_sending(self, graph_module: fx.GraphModule, collection: str) -> None:
        """Ranks send lengths and weights along with the ids."""
        for select in nodes_of_kind(graph_module, "select_features"):
            module, meta = node_module(graph_module, select, SelectFeatures), meta_of(select)
            senders = [user for user in select.users if meta_of(user).kind in ("bucketize", "input_dist_start")]
            if meta.collection != collection or not senders:
                continue
            module.leave_on_device()
            with graph_module.graph.inserting_before(senders[0]):
                copy = add_node(
                    graph_module, "to_host", ToHost(with_bags=True), (select,), meta, module.tables, self.name
                )
            annotate(copy, replace(meta_of(copy), device="cpu"))
            for sender in senders:
                sender.replace_input_with(select, copy)

    def _after_hashing(
        self, graph_module: fx.GraphModule, hash_ids: fx.Node, module: HashIds, store: TableStore
    ) -> None:
        items = [user for user in hash_ids.users if user.target is operator.getitem and user.args[1] == 0]
        (rows,) = items or [hash_ids]
        meta = meta_of(hash_ids)
        with graph_module.graph.inserting_after(rows):
            copy = add_node(
                graph_module, "to_device", ToDevice(store), (rows,), meta, module.tables, self.name, meta.shape
            )
        replace_inputs({rows: copy}, but={copy})
