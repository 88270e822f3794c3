"""fuse_hash_lookup: ``hash_ids`` and the only ``lookup`` after it become ``hash_lookup``, if one kernel can do both.

Such a kernel finds a row and adds it to its bag right away: row numbers are not written out in between, and are still
in the cache when they are read. In training, ids that have no row yet get one afterwards, and their bags are pooled
again.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

from torch import fx

from recfx.diagnostics import Diagnostic
from recfx.ir.typed_access import meta_of, node_module
from recfx.nodes import HashIds, HashLookup, Lookup
from recfx.passes._nodes import add_node, nodes_of_kind, remove_node, renumber
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class FuseHashLookup:
    """Fuse what a target has a kernel for.

    Args:
        backend: ``"auto"``, or the one backend that every lookup must use.
    """

    backend: str = "auto"
    name: str = "fuse_hash_lookup"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place; declines, with a reason, each ``hash_ids`` that it does not fuse.

        Raises:
            ConversionError: the named backend cannot serve a lookup.
        """
        declined: list[Diagnostic] = []
        modified = False
        for node in nodes_of_kind(graph_module, "hash_ids"):
            lookups = _lookups_of(node)
            refusal = self._decline(graph_module, node, lookups)
            if refusal is not None:
                declined.append(replace(refusal, path=meta_of(node).collection, node=node.name))
                continue
            self._fuse(graph_module, node, lookups[0])
            modified = True
        if modified:
            renumber(graph_module, ("lookup",))
        return PassResult(graph_module, modified, tuple(declined))

    def _decline(self, graph_module: fx.GraphModule, node: fx.Node, lookups: list[fx.Node]) -> Diagnostic | None:
        if len(lookups) > 1:
            names = ", ".join(lookup.name for lookup in lookups)
            message = f"{names} read the rows, and each would hash the ids again."
            return Diagnostic("several_lookups", "", message, by=self.name)
        module = node_module(graph_module, lookups[0], Lookup)
        choice = module.select(self.backend)
        if choice.finding_declined is not None:
            return choice.finding_declined
        if module.permutes_keys:
            names = ", ".join(table.name for table in module.tables)
            message = f"{lookups[0].name} reads tables {names} in this order, which is not that of the batch's keys."
            return Diagnostic("keys_need_permutation", "", message, by=self.name)
        return None

    def _fuse(self, graph_module: fx.GraphModule, node: fx.Node, lookup: fx.Node) -> None:
        hash_module, lookup_module = node_module(graph_module, node, HashIds), node_module(graph_module, lookup, Lookup)
        (ids,) = node.all_input_nodes
        with graph_module.graph.inserting_before(lookup):
            fused = add_node(
                graph_module,
                "hash_lookup",
                HashLookup(hash_module, lookup_module),
                (ids,),
                meta_of(lookup),
                lookup_module.tables,
                self.name,
                meta_of(lookup).shape,
            )
        lookup.replace_all_uses_with(fused)
        items = [user for user in node.users if user is not lookup]
        for old in (lookup, *items, node):
            remove_node(graph_module, old)


def _lookups_of(hash_ids: fx.Node) -> list[fx.Node]:
    """The lookups that read the rows, even if these are one of several values that the node returns."""
    found: dict[fx.Node, None] = {}
    for user in hash_ids.users:
        found |= dict.fromkeys(user.users if user.target is operator.getitem else (user,))
    return list(found)
