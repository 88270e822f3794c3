"""batch_lookups: one table-batched lookup for tables that one kernel call can serve.

Tables share a call when they read the same ids, and dtype, device, combine, optimizer settings and the kernel, if a
pass has decided on one, are equal, and so are their numbers of columns if rows are not combined. Their ``mean_divide``
nodes, which count the same ids, are merged as well. If the tables of a group are not adjacent, ``keyed_tensor``, or
``jagged_dict``, puts the keys back into the standard order.
"""

from collections.abc import Hashable

from torch import fx

from recfx.ir.node_kinds import ASSEMBLERS, NOT_COMBINED
from recfx.ir.operator_graph import OperatorGraph, names_in
from recfx.passes.base import PassResult


def batch_lookups(graph: OperatorGraph) -> PassResult:
    """Merge the lookups that lead to the same output, or to the same ``output_dist_start``."""
    for output in graph.of_kind("output_dist_start", *ASSEMBLERS):
        lookup_of = {pooled: lookup for pooled in output.all_input_nodes if (lookup := _lookup(graph, pooled))}
        counted_of = {lookup.args: pooled.args[1] for pooled, lookup in lookup_of.items() if pooled is not lookup}
        groups: dict[Hashable, list[fx.Node]] = {}
        for pooled, lookup in lookup_of.items():
            counted = pooled.args[1] if pooled is not lookup else counted_of.get(lookup.args)
            groups.setdefault((_key(graph, lookup), counted), []).append(pooled)
        if len(groups) < len(lookup_of):
            with graph.graph.inserting_before(output):
                merged = [_merge(graph, group, [lookup_of[pooled] for pooled in group]) for group in groups.values()]
            output.args = (*merged, *(node for node in output.all_input_nodes if node not in lookup_of))
    graph.remove_unused()
    return PassResult(graph)


def _merge(graph: OperatorGraph, pooled: list[fx.Node], lookups: list[fx.Node]) -> fx.Node:
    collection, first = graph.collection(lookups[0]).name, lookups[0]
    tables = tuple(table.name for lookup in lookups for table in graph.tables(lookup))
    rows = tuple(first.all_input_nodes)
    decided = {"combine": first.kwargs["combine"], "kernel": first.kwargs.get("kernel")}
    lookup = graph.add("lookup", rows, collection, tables=tables, **decided)
    divisions = [node for node in pooled if graph.kind(node) == "mean_divide"]
    if not divisions:
        return lookup
    divided = tuple(name for node in divisions for name in names_in(node, "divided"))
    return graph.add("mean_divide", (lookup, divisions[0].all_input_nodes[1]), collection, divided=divided)


def _lookup(graph: OperatorGraph, pooled: fx.Node) -> fx.Node | None:
    """The lookup whose pooled rows, or their means, are a node's value; None if they come from elsewhere."""
    node = pooled.all_input_nodes[0] if graph.kind(pooled) == "mean_divide" else pooled
    return node if graph.kind(node) == "lookup" else None


def _key(graph: OperatorGraph, lookup: fx.Node) -> Hashable:
    collection = graph.collection(lookup)
    settings = {
        (collection.facts_of(table).dtype, collection.kernel_groups.get(table.table_name))
        for table in graph.tables(lookup)
    }
    combine = lookup.kwargs["combine"]
    dims = {table.embedding_dim for table in graph.tables(lookup)} if combine == NOT_COMBINED else ()
    return lookup.args, frozenset(settings), combine, lookup.kwargs.get("kernel"), frozenset(dims)
