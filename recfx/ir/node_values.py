"""How big the value of a node is, where it is, and what the node sends: all of it follows from graph and context."""

from __future__ import annotations

import sympy
from torch import fx

from recfx.ir import exchange
from recfx.ir.columns import total_dim
from recfx.ir.meta import BATCH, WORLD, Collective, NodeMeta
from recfx.ir.node_kinds import NODE_KINDS, NOT_COMBINED, Size, Stage, ValueType, size_of_ids, size_of_unpooled
from recfx.ir.operator_graph import OperatorGraph, hop_of, source_of
from recfx.ir.tables import output_dtype


def size_of(graph: OperatorGraph, node: fx.Node) -> Size:
    """The size of a node's value, symbolic in ``B``, ``W`` and ``L_<feature>``; for a KJT, the number of ids."""
    kind, collection, tables = graph.kind(node), graph.collection(node), graph.tables(node)
    if NODE_KINDS[kind].like_input:
        return size_of(graph, source_of(node))
    if node.kwargs.get("combine") == NOT_COMBINED:
        return size_of_unpooled(_ids_of(graph, node), tables)
    usual, dtype = NODE_KINDS[kind].size(tables)
    if collection.sharding is None:
        return Size(usual, dtype)
    if kind in ("bucketize", "input_dist_start"):
        return Size((exchange.sent_ids(collection.sharding.by_rank()),), dtype)
    if NODE_KINDS[kind].size is size_of_ids and graph.works_on_shards(node):
        return Size((exchange.arriving_ids(collection.sharding.local()),), dtype)
    if kind == "output_dist_start":
        hop = collection.hops(str(node.kwargs["way"]))[hop_of(node)]
        return Size((hop.samples, sympy.Integer(total_dim(list(hop.columns)))), output_dtype(tables))
    if kind == "output_dist_wait":
        start = node.all_input_nodes[0]
        hops, hop_number = collection.hops(str(start.kwargs["way"])), hop_of(start) + 1
        samples = hops[hop_number].samples if hop_number < len(hops) else BATCH
        return Size((samples, sympy.Integer(total_dim(graph.columns(node)))), dtype)
    if kind == "mean_divide":
        return Size((BATCH, sympy.Integer(total_dim(graph.columns(node)))), dtype)
    if kind in ("lookup", "hash_lookup"):
        return Size((WORLD * BATCH, sympy.Integer(total_dim(graph.columns(node)))), dtype)
    return Size(usual, dtype)


def _ids_of(graph: OperatorGraph, lookup: fx.Node) -> sympy.Expr:
    """How many ids a lookup reads."""
    tables, sharding = graph.tables(lookup), graph.collection(lookup).sharding
    if sharding is None or not graph.works_on_shards(lookup):
        return size_of_ids(tables).shape[0]
    names = {table.name for table in tables}
    return exchange.arriving_ids([shard for shard in sharding.local() if shard.name in names])


def collectives_of(graph: OperatorGraph, node: fx.Node) -> tuple[Collective, ...]:
    """The collective calls of a node, in order, with those of the backward last."""
    kind, collection = graph.kind(node), graph.collection(node)
    sharding = collection.sharding
    if sharding is None:
        return ()
    if kind == "input_dist_start":
        return exchange.of_splits(sharding.world_size)
    if kind == "input_dist_wait":
        return exchange.of_ids(sharding.by_rank(), sharding.world_size, collection.is_weighted)
    if kind == "output_dist_start":
        return collection.hops(str(node.kwargs["way"]))[hop_of(node)].collectives
    return ()


def device_of(graph: OperatorGraph, node: fx.Node) -> str:
    """The type of the device of a node's value: ids stay on the host from ``to_host`` until ``to_device``."""
    kind, collection = NODE_KINDS[graph.kind(node)], graph.collection(node)
    if kind.like_input:
        return device_of(graph, source_of(node))
    if ValueType.HOST_IDS in kind.outputs:
        return "cpu"
    if ValueType.DEVICE_ROWS in kind.outputs or kind.stage not in (Stage.INPUT_DIST, Stage.HASH):
        return collection.device
    if kind.stage is Stage.HASH:
        return collection.index_device
    has_source = node.all_input_nodes and graph.kind(source_of(node))
    return device_of(graph, source_of(node)) if has_source else collection.device


def runs_on_host(graph: OperatorGraph, node: fx.Node) -> bool:
    """Whether a node runs on the host of the device that has the tables, where the value that it takes is as well."""
    kind = NODE_KINDS[graph.kind(node)]
    copies = ValueType.HOST_IDS in kind.outputs and not kind.like_input
    return graph.collection(node).copies_ids and not copies and device_of(graph, node) == "cpu"


def meta_of_value(graph: OperatorGraph, node: fx.Node, made_by: str = "") -> NodeMeta:
    """All of this as the metadata of a node."""
    (shape, dtype), collection = size_of(graph, node), graph.collection(node)
    return NodeMeta(
        kind=graph.kind(node),
        collection=collection.name,
        made_by=made_by,
        shape=shape,
        dtype=dtype,
        bytes=sympy.Integer(dtype.itemsize) * sympy.prod(shape),
        device=device_of(graph, node),
        on_host=runs_on_host(graph, node),
        source=collection.source,
        tables=tuple(table.name for table in graph.tables(node)),
        kernel=str(node.kwargs.get("kernel", "")),
        collectives=collectives_of(graph, node),
    )
