"""How big the value of a node is, where it is, and what the node sends: all of it follows from graph and context."""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch import fx

from recfx.ir.context import CollectionContext
from recfx.ir.dedup import different
from recfx.ir.meta import BATCH, WORLD, Collective, NodeMeta, mean_length
from recfx.ir.node_kinds import (
    NODE_KINDS,
    NOT_COMBINED,
    Size,
    Stage,
    ValueType,
    size_of_ids,
    size_of_unpooled,
)
from recfx.ir.operator_graph import OperatorGraph, hop_of, source_of
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import Shard, TableSpec, output_dtype, total_dim

_INT64, _FLOAT32 = 8, 4


def sent_ids(sharding: CollectionSharding) -> sympy.Expr:
    """The ids that a rank sends to all shards. Cutting a table's rows into pieces does not change their number."""
    tables = [(table.table.sent_lengths, table.times_sent) for table in sharding.tables]
    return BATCH * sympy.Add(*(times * mean_length(name) for names, times in tables for name in names))


def arriving_ids(shards: list[Shard]) -> sympy.Expr:
    """The ids that all ranks send to these shards of one rank, if all rows are equally likely."""
    return WORLD * BATCH * sympy.Add(*(shard.expected_ids() for shard in shards))


def of_splits(world_size: int) -> tuple[Collective, ...]:
    """``input_dist_start`` sends the sizes of lengths, ids and weights that follow, a mark, and the batch size."""
    if world_size == 1:
        return ()
    return (Collective("all_to_all", sympy.Integer(5 * world_size * _INT64)),)


def of_ids(sharding: CollectionSharding, is_weighted: bool) -> tuple[Collective, ...]:
    """``input_dist_wait`` sends lengths and ids in one message, and weights, if there are any, in another."""
    if sharding.world_size == 1:
        return ()
    bags, ids = sum(len(table.filled) * len(table.table.feature_names) for table in sharding.tables), sent_ids(sharding)
    sizes = [(BATCH * bags + ids) * _INT64] + ([ids * _FLOAT32] if is_weighted else [])
    return tuple(Collective("all_to_all", size) for size in sizes)


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
    if kind == "dedup_ids":
        return Size((_different_ids(tables),), dtype)
    if kind in ("bucketize", "input_dist_start"):
        return Size((sent_ids(collection.sharding),), dtype)
    if NODE_KINDS[kind].size is size_of_ids and graph.works_on_shards(node):
        return Size((arriving_ids(collection.sharding.local()),), dtype)
    if kind == "output_dist_start":
        hop = graph.hop(node)
        return Size((hop.samples, sympy.Integer(hop.dim)), output_dtype(tables))
    if kind == "output_dist_wait" and not collection.is_pooled:
        return size_of_unpooled(_different_ids(tables), tables)
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


def _different_ids(tables: tuple[TableSpec, ...]) -> sympy.Expr:
    """The ids of one rank's batch that are sent, each counted once, whatever shards they are sent to."""
    return BATCH * sympy.Add(*(mean_length(name) for table in tables for name in table.sent_lengths))


def _ids_of(graph: OperatorGraph, lookup: fx.Node) -> sympy.Expr:
    """How many ids a lookup reads."""
    tables, sharding = graph.tables(lookup), graph.collection(lookup).sharding
    if sharding is None or not graph.works_on_shards(lookup):
        return size_of_ids(tables).shape[0]
    names = {table.name for table in tables}
    return arriving_ids([shard for shard in sharding.local() if shard.name in names])


def collectives_of(graph: OperatorGraph, node: fx.Node) -> tuple[Collective, ...]:
    """The collective calls of a node, in order, with those of the backward last."""
    kind, collection = graph.kind(node), graph.collection(node)
    sharding = collection.sharding
    if sharding is None:
        return ()
    if kind == "input_dist_start":
        return of_splits(sharding.world_size)
    if kind == "input_dist_wait":
        return of_ids(sharding, collection.is_weighted)
    if kind == "output_dist_start":
        return graph.hop(node).collectives
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


def _as_they_come(
    collection: CollectionContext, shape: tuple[sympy.Expr, ...], collectives: tuple[Collective, ...]
) -> tuple[tuple[sympy.Expr, ...], tuple[Collective, ...]]:
    """The shape and the collectives of a value if all ids are sent, and not only the different ones."""
    features = {feature for table in collection.tables for feature in table.feature_names}
    lengths = {mean_length(different(feature)): mean_length(feature) for feature in features}
    shape = tuple(size.xreplace(lengths) for size in shape)
    return shape, tuple(replace(call, bytes=call.bytes.xreplace(lengths)) for call in collectives)


def meta_of_value(graph: OperatorGraph, node: fx.Node, made_by: str = "") -> NodeMeta:
    """The metadata of a node, from all of the above."""
    (shape, dtype), collection = size_of(graph, node), graph.collection(node)
    collectives = collectives_of(graph, node)
    if collection.sends_different and not graph.of_kind("dedup_ids"):
        shape, collectives = _as_they_come(collection, shape, collectives)  # passes of the user's leave it out
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
        combine=str(node.kwargs.get("combine", "")),
        collectives=collectives,
    )
