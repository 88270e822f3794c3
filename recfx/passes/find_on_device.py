"""find_on_device: in eval mode, rows are found where the tables are, instead of on the host.

``to_host``, ``hash_ids`` and ``to_device`` become ``find_rows``, which reads copies of the indexes. It is not one of
``recfx.passes()``: it makes the graph that a collection runs in eval mode from the one that it trains with. The new
node runs the nodes that it replaces where it cannot serve.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from recfx.errors import Diagnostic
from recfx.ir.operator_graph import OperatorGraph, names_in
from recfx.passes.base import PassResult


def find_on_device(graph: OperatorGraph) -> PassResult:
    """Replace every ``hash_ids`` for whose device a target finds rows; declines, with a reason, where none does.

    Where tables are on the host as well, there is nothing to do, unless their lookups are served by a target that also
    finds rows (in Triton's interpreter).
    """
    declined: list[Diagnostic] = []
    for node in graph.of_kind("hash_ids"):
        around, collection = _around(graph, node), graph.collection(node)
        if collection.device == "meta":
            continue
        finder = graph.context.targets.find_rows(collection.device)
        kernels = {str(lookup.kwargs.get("kernel", "")) for lookup in around.lookups}
        if not collection.copies_ids and kernels != {finder.backend}:
            continue
        code, message = "", ""
        if len(graph.hashing(collection.name)) > 1:
            code, message = "several_hash_ids", "several nodes hash ids, and copies of indexes are read by one."
        elif not around.lookups:
            code, message = "operator_in_between", "an operator between them reads the rows first."
        elif finder.backend == "reference":
            why = " ".join(each.message for each in finder.declined if each.by != "cpu")
            code = "found_on_host"
            message = f"no target finds rows on {collection.device}: {why or 'none has a kernel for it.'}"
        if code:
            declined.append(Diagnostic(code, collection.name, message, node=node.name))
            continue
        _replace(graph, node, around, finder.backend)
    return PassResult(graph, tuple(declined))


@dataclass(frozen=True)
class _Around:
    """The nodes before and after a ``hash_ids``."""

    to_host: fx.Node | None
    to_device: fx.Node | None
    lookups: tuple[fx.Node, ...]


def _around(graph: OperatorGraph, hash_ids: fx.Node) -> _Around:
    (ids,) = hash_ids.all_input_nodes
    items = [user for user in hash_ids.users if user.target is operator.getitem and user.args[1] == 0]
    (rows,) = items or [hash_ids]
    copies = [user for user in rows.users if graph.kind(user) == "to_device"]
    (read,) = copies or [rows]
    lookups = tuple(user for user in read.users if graph.kind(user) == "lookup")
    return _Around(ids if graph.kind(ids) == "to_host" else None, copies[0] if copies else None, lookups)


def _replace(graph: OperatorGraph, node: fx.Node, around: _Around, operators: str) -> None:
    (ids,) = (around.to_host or node).all_input_nodes
    hashed, collection = names_in(node, "hashed"), graph.collection(node).name
    with graph.graph.inserting_before(node):
        find = graph.add("find_rows", (ids,), collection, hashed=hashed, operators=operators)
    graph.replace(node, find)
    if around.to_device is not None:
        graph.replace(around.to_device, around.to_device.all_input_nodes[0])
    graph.remove_unused()
