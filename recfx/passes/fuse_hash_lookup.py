"""fuse_hash_lookup: ``hash_ids`` and the only ``lookup`` after it become ``hash_lookup``, if one kernel can do both.

Such a kernel finds a row and adds it to its bag right away: row numbers are not written out in between, and are still
in the cache when they are read. In training, ids that have no row yet get one afterwards, and their bags are pooled
again.
"""

import operator
from dataclasses import replace

from torch import fx

from recfx.errors import Diagnostic
from recfx.ir.operator_graph import OperatorGraph, attributes_in, names_in
from recfx.passes.base import PassResult


def fuse_hash_lookup(graph: OperatorGraph) -> PassResult:
    """Fuse what a backend has a kernel for; declines, with a reason, each ``hash_ids`` that stays."""
    declined: list[Diagnostic] = []
    for node in graph.of_kind("hash_ids"):
        readers = _readers(graph, node)
        refusal = _refusal(graph, readers)
        if refusal is not None:
            declined.append(replace(refusal, path=graph.collection(node).name, node=node.name))
            continue
        (lookup,) = readers
        collection = graph.collection(lookup).name
        with graph.graph.inserting_before(lookup):
            hashed = names_in(node, "hashed")
            fused = graph.add(
                "hash_lookup", tuple(node.all_input_nodes), collection, hashed=hashed, **attributes_in(lookup)
            )
        graph.replace(lookup, fused)
        graph.remove_unused()
    return PassResult(graph, tuple(declined))


def _refusal(graph: OperatorGraph, readers: list[fx.Node]) -> Diagnostic | None:
    operators = [reader.name for reader in readers if graph.kind(reader) != "lookup"]
    if operators:
        message = f"{', '.join(operators)} reads the rows, which one kernel for both would not write out."
        return Diagnostic("operator_in_between", "", message)
    if len(readers) != 1:
        names = ", ".join(reader.name for reader in readers)
        message = f"{names} read the rows, and each would hash the ids again."
        return Diagnostic("several_lookups", "", message)
    (lookup,) = readers
    refusal = graph.served(lookup).finding_declined
    if refusal is not None:
        return refusal
    tables = graph.tables(lookup)
    if tuple(key for table in tables for key in table.embedding_names) != graph.collection(lookup).local_keys:
        names = ", ".join(table.name for table in tables)
        message = f"{lookup.name} reads tables {names} in this order, which is not that of the batch's keys."
        return Diagnostic("keys_need_permutation", "", message)
    return None


def _readers(graph: OperatorGraph, hash_ids: fx.Node) -> list[fx.Node]:
    """The operators that take the rows of ``hash_ids``, even if these are one of several values that it returns."""
    readers: dict[fx.Node, None] = {}
    for user in hash_ids.users:
        readers |= dict.fromkeys(user.users if user.target is operator.getitem else (user,))
    return list(readers)
