"""find_on_device: in eval mode, rows are found where the tables are, instead of on the host.

``to_host``, ``hash_ids`` and ``to_device`` become ``find_rows``, which reads copies of the indexes. It is not one of
``recfx.passes()``: it makes the graph that a collection runs in eval mode from the one that it trains with. The new
node shares the indexes, and runs the nodes that it replaces where it cannot serve.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

from torch import fx

from recfx.diagnostics import Diagnostic
from recfx.ir.meta import annotate
from recfx.ir.typed_access import meta_of, node_module
from recfx.lowering.operators import FIND_ROWS, select_operators
from recfx.nodes import FindRows, HashIds, Lookup, ToDevice, ToHost
from recfx.nodes.host_copies import crosses
from recfx.passes._nodes import add_node, nodes_of_kind, remove_node
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class FindOnDevice:
    """Replace every ``hash_ids`` for whose device a target finds rows."""

    name: str = "find_on_device"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place; declines where no target has a kernel, with its reason.

        Where tables are on the host as well, there is nothing to do, unless their lookups are served by a target that
        also finds rows (in Triton's interpreter).
        """
        declined: list[Diagnostic] = []
        modified = False
        for node in nodes_of_kind(graph_module, "hash_ids"):
            found = _around(node)
            lookups = tuple(node_module(graph_module, each, Lookup) for each in found.lookups)
            device, indexes = lookups[0].store.device, node_module(graph_module, node, HashIds).indexes
            if device.type == "meta":
                continue
            chosen = select_operators(FIND_ROWS, device)
            if not crosses(device, indexes.device) and {each.kernel for each in lookups} != {chosen.backend}:
                continue
            if chosen.backend == "reference":
                why = " ".join(each.message for each in chosen.declined if each.by != "cpu")
                message = f"no target finds rows on {device}: {why or 'none has a kernel for it.'}"
                declined.append(Diagnostic("found_on_host", indexes.collection, message, by=self.name, node=node.name))
                continue
            self._replace(graph_module, node, found, lookups)
            modified = True
        return PassResult(graph_module, modified, tuple(declined))

    def _replace(
        self, graph_module: fx.GraphModule, node: fx.Node, around: _Around, lookups: tuple[Lookup, ...]
    ) -> None:
        hash_ids = node_module(graph_module, node, HashIds)
        to_host = None if around.to_host is None else node_module(graph_module, around.to_host, ToHost)
        to_device = None if around.to_device is None else node_module(graph_module, around.to_device, ToDevice)
        (ids,) = (around.to_host or node).all_input_nodes
        module, like = FindRows(hash_ids, to_host, to_device, lookups), meta_of(node)
        with graph_module.graph.inserting_before(node):
            find = add_node(graph_module, "find_rows", module, (ids,), like, hash_ids.tables, self.name, like.shape)
        annotate(find, replace(meta_of(find), device=lookups[0].store.device.type))
        node.replace_all_uses_with(find)
        if around.to_device is not None:
            around.to_device.replace_all_uses_with(around.to_device.all_input_nodes[0])
            remove_node(graph_module, around.to_device)
        remove_node(graph_module, node)
        if around.to_host is not None:
            remove_node(graph_module, around.to_host)


@dataclass(frozen=True)
class _Around:
    """The nodes before and after a ``hash_ids``."""

    to_host: fx.Node | None
    to_device: fx.Node | None
    lookups: tuple[fx.Node, ...]


def _around(hash_ids: fx.Node) -> _Around:
    (ids,) = hash_ids.all_input_nodes
    items = [user for user in hash_ids.users if user.target is operator.getitem and user.args[1] == 0]
    (rows,) = items or [hash_ids]
    copies = [user for user in rows.users if meta_of(user).kind == "to_device"]
    (read,) = copies or [rows]
    lookups = tuple(user for user in read.users if meta_of(user).kind == "lookup")
    return _Around(ids if meta_of(ids).kind == "to_host" else None, copies[0] if copies else None, lookups)
