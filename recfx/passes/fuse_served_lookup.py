"""fuse_served_lookup: finding ids and pooling their rows become one node, if the target has an operator for both."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from recfx.ir.meta import annotate
from recfx.ir.typed_access import find_module, meta_of, node_module
from recfx.passes._nodes import nodes_of_kind, remove_node, renumber
from recfx.passes.base import PassResult
from recfx.serving import SCRIPT, FindFrozenRows, PoolRows, ServingTarget


@dataclass(frozen=True)
class FuseServedLookup:
    """Replace ``lookup``, and the ``find_rows`` before it, by ``hash_lookup``.

    Args:
        target: says which module serves that node, if any.
    """

    target: ServingTarget = SCRIPT
    name: str = "fuse_served_lookup"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        found = nodes_of_kind(graph_module, "lookup")
        if self.target.fused is None or not found:
            return PassResult(graph_module, modified=False)
        for number, node in enumerate(found):
            rows = node.all_input_nodes[0]
            find = find_module(graph_module, rows)
            pool = node_module(graph_module, node, PoolRows)
            fused = self.target.fused(pool, find if isinstance(find, FindFrozenRows) else None)
            if isinstance(find, FindFrozenRows):
                node.args = (rows.all_input_nodes[0],)
            graph_module.delete_submodule(str(node.target))
            node.target = f"hash_lookup_{number}"
            graph_module.add_submodule(node.target, fused)
            annotate(node, replace(meta_of(node), kind="hash_lookup", made_by=self.name, kernel=fused.kernel))
        for node in nodes_of_kind(graph_module, "find_rows"):
            for user in list(node.users):
                user.replace_input_with(node, node.all_input_nodes[0])  # lengths are those of the ids
            remove_node(graph_module, node)
        graph_module.meta["recfx_numbers"]["hash_lookup"] = len(found) - 1
        renumber(graph_module, ("hash_lookup",))
        return PassResult(graph_module, modified=True)
