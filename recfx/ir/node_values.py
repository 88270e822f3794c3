"""How big the value of a node is, where it is, and what the node sends: all of it follows from graph and context."""

from dataclasses import replace
from typing import NamedTuple

import sympy
import torch
from torch import fx

from recfx.ir.dedup import different
from recfx.ir.meta import BATCH, WORLD, Collective, NodeMeta, mean_length
from recfx.ir.node_kinds import NODE_KINDS, NOT_COMBINED, Measure, Stage, ValueType
from recfx.ir.operator_graph import OperatorGraph, hop_of, source_of
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import TableSpec, embedding_dims, output_dtype, total_dim

_INT64, _FLOAT32 = 8, 4


class Size(NamedTuple):
    """How big a value is."""

    shape: tuple[sympy.Expr, ...]  # symbolic, in ``B``, ``W`` and ``L_<feature>``; for a KJT, the number of ids
    dtype: torch.dtype  # the dtype of its elements


def sent_ids(sharding: CollectionSharding) -> sympy.Expr:
    """The ids that a rank sends to all shards. Cutting a table's rows into pieces does not change their number."""
    tables = [(table.table.sent_lengths, table.times_sent) for table in sharding.tables]
    return BATCH * sympy.Add(*(times * mean_length(name) for names, times in tables for name in names))


def size_of(graph: OperatorGraph, node: fx.Node) -> Size:
    """The size of a node's value."""
    kind, collection, tables = NODE_KINDS[graph.kind(node)], graph.collection(node), graph.tables(node)
    if kind.like_input:
        return size_of(graph, source_of(node))
    measure, sharding = kind.outputs[0].measure, collection.sharding
    if kind.name == "output_dist_start" and sharding is not None:
        hop = graph.hop(node)
        return Size((hop.samples, sympy.Integer(hop.dim)), output_dtype(tables))
    not_pooled = kind.name == "output_dist_wait" and not collection.is_pooled
    if measure is Measure.ROWS or not_pooled or node.kwargs.get("combine") == NOT_COMBINED:
        ids = _different_ids(tables) if not_pooled else _ids_of(graph, node)
        return Size((ids, sympy.Integer(tables[0].embedding_dim)), output_dtype(tables))
    if measure is Measure.COLUMNS:
        is_output = kind.outputs[0] is ValueType.KEYED_TENSOR
        dim = sum(embedding_dims(tables)) if is_output else total_dim(graph.columns(node))
        return Size((_samples_of(graph, node), sympy.Integer(dim)), output_dtype(tables))
    if measure is Measure.NOTHING:
        return Size((sympy.Integer(0),), torch.int64)
    if sharding is not None and kind.name == "dedup_ids":
        return Size((_different_ids(tables),), torch.int64)
    if sharding is not None and kind.name in ("bucketize", "input_dist_start"):
        return Size((sent_ids(sharding),), torch.int64)
    return Size((_ids_of(graph, node),), torch.int64)


def _samples_of(graph: OperatorGraph, node: fx.Node) -> sympy.Expr:
    """How many rows pooled values have: shards pool the samples of all ranks, which are sent back hop by hop."""
    kind, collection = graph.kind(node), graph.collection(node)
    if collection.sharding is None:
        return BATCH
    if kind == "output_dist_wait":
        start = source_of(node)
        following = collection.hops(str(start.kwargs["way"]))[hop_of(start) + 1 :]
        return following[0].samples if following else BATCH
    return WORLD * BATCH if kind in ("lookup", "hash_lookup") else BATCH


def _different_ids(tables: tuple[TableSpec, ...]) -> sympy.Expr:
    """The ids of one rank's batch that are sent, each counted once, whatever shards they are sent to."""
    return BATCH * sympy.Add(*(mean_length(name) for table in tables for name in table.sent_lengths))


def _ids_of(graph: OperatorGraph, node: fx.Node) -> sympy.Expr:
    """How many ids a node reads, or passes on: those of its tables in one rank's batch, or those sent to its shards."""
    tables, sharding = graph.tables(node), graph.collection(node).sharding
    if sharding is None or not graph.works_on_shards(node):
        return BATCH * sympy.Add(*(mean_length(feature) for table in tables for feature in table.feature_names))
    names = {table.name for table in tables}  # all rows are taken to be equally likely
    return WORLD * BATCH * sympy.Add(*(shard.expected_ids() for shard in sharding.local() if shard.name in names))


def collectives_of(graph: OperatorGraph, node: fx.Node) -> tuple[Collective, ...]:
    """The collective calls of a node, in order, with those of the backward last."""
    kind, collection = graph.kind(node), graph.collection(node)
    sharding, sizes = collection.sharding, list[sympy.Expr]()
    if sharding is not None and kind == "output_dist_start":
        return graph.hop(node).collectives
    if sharding is None or sharding.world_size == 1:
        return ()
    if kind == "input_dist_start":  # the sizes of lengths, ids and weights that follow, a mark, and the batch size
        sizes = [sympy.Integer(5 * sharding.world_size * _INT64)]
    elif kind == "input_dist_wait":  # lengths and ids in one message, and weights, if there are any, in another
        bags, ids = sum(len(one.filled) * len(one.table.feature_names) for one in sharding.tables), sent_ids(sharding)
        sizes = [(BATCH * bags + ids) * _INT64] + ([ids * _FLOAT32] if collection.is_weighted else [])
    return tuple(Collective("all_to_all", size) for size in sizes)


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


def meta_of_value(graph: OperatorGraph, node: fx.Node) -> NodeMeta:
    """The metadata of a node, from all of the above."""
    (shape, dtype), collection = size_of(graph, node), graph.collection(node)
    collectives = collectives_of(graph, node)
    if collection.sends_different and not graph.of_kind("dedup_ids"):  # a user's passes leave it out: all ids are sent
        features = {feature for table in collection.tables for feature in table.feature_names}
        lengths = {mean_length(different(feature)): mean_length(feature) for feature in features}
        shape = tuple(size.xreplace(lengths) for size in shape)
        collectives = tuple(replace(call, bytes=call.bytes.xreplace(lengths)) for call in collectives)
    return NodeMeta(
        kind=graph.kind(node), collection=collection.name, shape=shape, dtype=dtype,
        bytes=sympy.Integer(dtype.itemsize) * sympy.prod(shape), device=device_of(graph, node),
        on_host=runs_on_host(graph, node), source=collection.source,
        tables=tuple(table.name for table in graph.tables(node)), kernel=str(node.kwargs.get("kernel", "")),
        combine=str(node.kwargs.get("combine", "")), collectives=collectives,
    )  # fmt: skip
