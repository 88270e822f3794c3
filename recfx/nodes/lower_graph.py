"""Makes what runs from a graph of operators: the same nodes, each of which calls a module.

This is the one place where a graph meets tables, process groups and kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx, nn

from recfx.ir.context import CollectionContext
from recfx.ir.meta import NodeMeta, annotate
from recfx.ir.names import node_name
from recfx.ir.operator_graph import OperatorGraph, hop_of, names_in
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import embedding_dims
from recfx.kernels.bucketize import Routes
from recfx.nodes.base import NodeModule
from recfx.nodes.bucketize import Bucketize
from recfx.nodes.dist_groups import DistGroups, sent_on
from recfx.nodes.hash_ids import HashIds
from recfx.nodes.hash_lookup import HashLookup
from recfx.nodes.input_dist import InputDistStart, InputDistWait
from recfx.nodes.keyed_tensor import AssembleKeyedTensor
from recfx.nodes.lookup import Lookup
from recfx.nodes.mean_divide import MeanDivide
from recfx.nodes.output_dist import STARTS, OutputDistStart, OutputDistWait
from recfx.nodes.resources import Resources
from recfx.nodes.select_features import SelectFeatures
from recfx.nodes.table_indexes import TableIndexes
from recfx.nodes.to_device import ToDevice
from recfx.nodes.to_host import ToHost


def lower_graph(
    graph: OperatorGraph, metas: Mapping[fx.Node, NodeMeta], resources: Resources, backend: str = "auto"
) -> fx.GraphModule:
    """Lower the graph of one collection.

    Args:
        graph: the graph, after the last rewrite.
        metas: the metadata of its nodes.
        resources: what the modules work on.
        backend: ``"auto"``, or the one backend that every lookup must use.

    Returns:
        A graph module whose nodes have the names, the order and the metadata of ``graph``.

    Raises:
        ConversionError: ``backend_unusable``, ``table_shape_changed``.
    """
    root, lowered, known = nn.Module(), fx.Graph(), dict[fx.Node, fx.Node]()
    numbers: dict[str, int] = {}
    for node in graph.graph.nodes:
        if node not in metas:
            known[node] = lowered.node_copy(node, known.__getitem__)
            continue
        kind = graph.kind(node)
        number = numbers[kind] = numbers.get(kind, -1) + 1
        target = f"{kind}_{number}" if number else kind
        module = MAKERS[kind](Lowered(graph, node, graph.collection(node), resources, backend))
        module.label = node.name
        root.add_module(target, module)
        inputs = tuple(known[each] for each in node.all_input_nodes)
        known[node] = lowered.create_node("call_module", target, inputs, {}, name=node.name)
        annotate(known[node], metas[node])
    graph_module = fx.GraphModule(root, lowered)
    graph_module.meta["recfx_numbers"] = numbers
    return graph_module


@dataclass(frozen=True)
class Lowered:
    """A node, and everything that its module is made from."""

    graph: OperatorGraph
    node: fx.Node
    collection: CollectionContext
    resources: Resources
    backend: str

    @property
    def sharding(self) -> CollectionSharding:
        assert self.collection.sharding is not None  # the verifier refuses such nodes elsewhere
        return self.collection.sharding

    @property
    def groups(self) -> DistGroups:
        assert self.resources.groups is not None
        return self.resources.groups


def _select_features(of: Lowered) -> SelectFeatures:
    collection = of.collection
    module = SelectFeatures(collection.name, collection.tables, collection.is_weighted)
    if collection.sharding is not None:
        module.prepare_to_send(of.sharding.world_size, collection.ids_on_host)
    if any(of.graph.kind(user) == "to_host" and user.kwargs.get("with_bags") for user in of.node.users):
        module.leave_on_device()
    return module


def _bucketize(of: Lowered) -> Bucketize:
    cut = [table for table in of.sharding.tables for _ in table.table.embedding_names]
    indexed = [each.table.hashing if each.table.has_index else None for each in cut]
    shards = of.sharding.by_rank()
    routes = Routes(
        row_borders=[each.row_borders() for each in cut],
        rows=[each.table.num_embeddings for each in cut],
        dense_rows=[0 if config is None else config.dense_rows for config in indexed],
        buckets=[0 if config is None else config.buckets for config in indexed],
        seeds=[0 if config is None else config.seed for config in indexed],
        sources=_sources(of),
        pieces=[shard.piece for shard in shards for _ in shard.table.embedding_names],
    )
    return Bucketize(routes, [name for shard in shards for name in shard.spec.embedding_names])


def _input_dist_start(of: Lowered) -> InputDistStart:
    collection, sharding, group = of.collection, of.sharding, of.groups.ids
    arriving = [name for shard in sharding.by_rank() for name in shard.spec.embedding_names]
    by_rank = [sharding.on_rank(rank) for rank in range(sharding.world_size)]
    splits = [sum(len(shard.table.embedding_names) for shard in shards) for shards in by_rank]
    # Routed ids have their order already; and on one rank with all tables in order, nothing moves.
    is_in_order = of.graph.of_kind("bucketize") or arriving == list(collection.keys)
    positions = None if is_in_order else _sources(of)
    is_weighted = collection.is_weighted and sharding.world_size > 1
    return InputDistStart(group, splits, positions, arriving, collection.name, sent_on(group), is_weighted)


def _sources(of: Lowered) -> list[int]:
    """The position of each key that arrives somewhere, among those of the selected ids."""
    positions = of.collection.keys.positions
    return [positions[name] for shard in of.sharding.by_rank() for name in shard.table.embedding_names]


def _hash_ids(of: Lowered) -> HashIds:
    collection, hashed = of.collection, names_in(of.node, "hashed")
    is_sharded = any(table.shard_of for table in collection.local)
    return HashIds(TableIndexes(collection.name, collection.local, hashed, of.resources.store, is_sharded))


def _lookup(of: Lowered) -> Lookup:
    collection, pooling = of.collection, str(of.node.kwargs["pooling"])
    tables, keys = of.graph.tables(of.node), collection.local_keys
    module = Lookup(collection.name, tables, pooling, keys, collection.is_weighted, of.resources.store, of.backend)
    if "kernel" in of.node.kwargs:
        module.choose_kernel()
    return module


def _hash_lookup(of: Lowered) -> HashLookup:
    hash_ids, lookup = _hash_ids(of), _lookup(of)
    for module, kind in ((hash_ids, "hash_ids"), (lookup, "lookup")):
        module.label = node_name(of.collection.name, kind)
    return HashLookup(hash_ids, lookup)


def _output_dist_start(of: Lowered) -> OutputDistStart:
    way, number = str(of.node.kwargs["way"]), hop_of(of.node)
    hop = of.collection.hops(way)[number]
    parts = [of.graph.columns(each) for each in of.node.all_input_nodes[:-1]]
    module = STARTS[hop.operation].of(hop, of.groups, parts, of.resources.store.device)
    module.way, module.hop = way, number
    module.late_backwards = of.resources.late_backwards
    return module


def _mean_divide(of: Lowered) -> MeanDivide:
    divided, keys = names_in(of.node, "divided"), of.collection.keys
    return MeanDivide(of.graph.tables(of.node), divided, keys, of.graph.columns(of.node))


def _keyed_tensor(of: Lowered) -> AssembleKeyedTensor:
    parts = [of.graph.columns(each) for each in of.node.all_input_nodes]
    return AssembleKeyedTensor(list(of.collection.keys), embedding_dims(of.collection.tables), parts)


MAKERS: dict[str, Callable[[Lowered], NodeModule]] = {
    "select_features": _select_features,
    "bucketize": _bucketize,
    "input_dist_start": _input_dist_start,
    "input_dist_wait": lambda of: InputDistWait(),
    "to_host": lambda of: ToHost(with_bags=bool(of.node.kwargs.get("with_bags"))),
    "hash_ids": _hash_ids,
    "to_device": lambda of: ToDevice(of.resources.store),
    "lookup": _lookup,
    "hash_lookup": _hash_lookup,
    "output_dist_start": _output_dist_start,
    "output_dist_wait": lambda of: OutputDistWait(),
    "mean_divide": _mean_divide,
    "keyed_tensor": _keyed_tensor,
}
"""What makes the module of each kind of node. A new kind is one line."""
