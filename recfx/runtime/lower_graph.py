"""Makes what runs from a graph of operators: the same nodes, each of which calls a module.

This is the one place where a graph meets tables, process groups and kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from recfx.errors import ConversionError, type_of
from recfx.ir.context import CollectionContext
from recfx.ir.meta import NodeMeta, annotate
from recfx.ir.operator_graph import OPERATOR_KEY, Operator, OperatorGraph, attributes_in, names_in, node_name
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import embedding_dims
from recfx.kernels.route.bucketize import Routes
from recfx.runtime.assemble import AssembleJaggedDict, AssembleKeyedTensor, MeanDivide
from recfx.runtime.base import NodeModule
from recfx.runtime.dedup_ids import DedupIds, ExpandRows
from recfx.runtime.dist_groups import DistGroups, sent_on
from recfx.runtime.find_rows import FindRows
from recfx.runtime.hash_ids import FindIds, HashIds, HashLookup, InsertIds, SnapshotIndexes
from recfx.runtime.input_dist import Bucketize, InputDistStart, InputDistWait
from recfx.runtime.lookup import Lookup
from recfx.runtime.output_dist import POOLED_STARTS, OutputDistStart, OutputDistWait
from recfx.runtime.rows_dist import ROW_STARTS, RowKeys
from recfx.runtime.select_features import SelectFeatures
from recfx.runtime.table_indexes import TableIndexes
from recfx.runtime.table_store import TableStore
from recfx.runtime.transfers import ToDevice, ToHost


class Runtime:
    """What a collection's graphs for training, for evaluation and for prefetching are all lowered from.

    It keeps the modules that were made for the first of them, so that nodes of the others share their state.

    Args:
        store: weights, indexes, fused optimizers and batches in flight.
        groups: the process groups of a sharded collection.
    """

    def __init__(self, store: TableStore, groups: DistGroups | None = None) -> None:
        self.store = store
        self.groups = groups
        self._made: dict[str, tuple[str, nn.Module]] = {}

    def add(self, name: str, kind: str, module: nn.Module) -> None:
        """Keep what runs for the node of this name, or for a part of it that would be a node of this kind."""
        self._made[name] = kind, module

    def module(self, name: str) -> nn.Module | None:
        """What runs for the node of this name; None if nothing was made for it yet."""
        return self._made[name][1] if name in self._made else None

    def of(self, kind: str) -> list[Any]:
        """What runs for the nodes of this kind, in the order of the nodes."""
        return [module for own, module in self._made.values() if own == kind]


class OwnNode(NodeModule):
    """Runs the user's module as a node. Graphs are made again at any time, so it must hold no parameters or buffers.

    Raises:
        ConversionError: ``operator_with_state``, ``not_lowered``.
    """

    def __init__(self, module: nn.Module, collection: str, kind: str) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ConversionError(
                f"the function that makes what runs for {kind!r} returned {type_of(module)}.",
                reason="not_lowered",
                module_path=collection,
                what_to_do="return an nn.Module from make=, whose forward takes the inputs of the node.",
            )
        state = next(itertools.chain(module.named_parameters(), module.named_buffers()), None)
        if state is not None:
            raise ConversionError(
                f"the module of {kind!r} has a parameter or buffer {state[0]!r}, but graphs are no state: they are "
                "made again when an optimizer is attached, and checkpoints do not have them.",
                reason="operator_with_state",
                module_path=collection,
                what_to_do="keep what is learned in the model itself, and let the operator do without.",
            )
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def lower_graph(
    graph: OperatorGraph,
    metas: Mapping[str, NodeMeta],
    make: Callable[[Lowered], nn.Module],
    runtime: Runtime | None = None,
    backend: str = "auto",
) -> fx.GraphModule:
    """Lower the graph of one collection.

    Args:
        graph: the graph, after the last rewrite.
        metas: the metadata of its nodes, by name.
        make: makes the module of a node: ``module_of``, for models.
        runtime: what the modules work on, with those that some nodes already have; None if they need nothing live.
        backend: ``"auto"``, or the one backend that every lookup must use.

    Returns:
        A graph module whose nodes have the names, the order and the metadata of ``graph``.

    Raises:
        ConversionError: ``backend_unusable``, ``table_shape_changed``, ``not_lowered``, ``operator_with_state``.
    """
    root, lowered, new_nodes = nn.Module(), fx.Graph(), dict[fx.Node, fx.Node]()
    numbers: dict[str, int] = {}
    for node in graph.graph.nodes:
        if node.name not in metas:
            new_nodes[node] = lowered.node_copy(node, new_nodes.__getitem__)
            continue
        kind = graph.kind(node)
        number = numbers[kind] = numbers.get(kind, -1) + 1
        target = f"{kind}_{number}" if number else kind
        module = None if runtime is None else runtime.module(node.name)
        if module is None:
            module = make(Lowered(graph, node, graph.collection(node), runtime, backend))
            if hasattr(module, "label"):
                module.label = node.name
            if runtime is not None:
                runtime.add(node.name, kind, module)
        root.add_module(target, module)
        inputs = fx.map_arg(node.args, new_nodes.__getitem__)
        new_nodes[node] = lowered.create_node("call_module", target, inputs, {}, name=node.name)
        annotate(new_nodes[node], metas[node.name])
        new_nodes[node].meta[OPERATOR_KEY] = Operator(graph, node)
    graph_module = fx.GraphModule(root, lowered)
    graph_module.meta["recfx_numbers"] = numbers
    return graph_module


def module_of(of: Lowered) -> NodeModule:
    """What runs for a node in a model; errors as for ``lower_graph``."""
    kind = of.graph.kind(of.node)
    return MAKERS[kind](of) if kind in MAKERS else make_own(of)


def make_own(of: Lowered) -> OwnNode:
    """What runs for a node of a user's operator: a module that calls the user's.

    Raises:
        ConversionError: ``not_lowered``, ``operator_with_state``.
    """
    kind = of.graph.kind(of.node)
    if kind not in OWN_MAKERS:
        raise ConversionError(
            f"no module runs {of.node.name}, because nothing lowers nodes of kind {kind!r}.",
            reason="not_lowered",
            module_path=of.collection.name,
            what_to_do="let the passes of recfx.passes() run as well; or call recfx.add_operator with make=.",
        )
    return OwnNode(OWN_MAKERS[kind](of), of.collection.name, kind)


@dataclass(frozen=True)
class Lowered:
    """A node, and everything that its module is made from."""

    graph: OperatorGraph
    node: fx.Node
    collection: CollectionContext
    runtime_or_none: Runtime | None
    backend: str

    @property
    def runtime(self) -> Runtime:
        assert self.runtime_or_none is not None  # see ``lower_graph``
        return self.runtime_or_none

    @property
    def attributes(self) -> dict[str, Any]:
        return attributes_in(self.node)

    @property
    def sharding(self) -> CollectionSharding:
        assert self.collection.sharding is not None  # the verifier refuses such nodes elsewhere
        return self.collection.sharding

    @property
    def groups(self) -> DistGroups:
        assert self.runtime.groups is not None
        return self.runtime.groups


def _select_features(of: Lowered) -> SelectFeatures:
    collection = of.collection
    module = SelectFeatures(collection.name, collection.tables, collection.is_weighted)
    if collection.sharding is not None:
        copies = any(of.graph.kind(user) == "to_host" and user.kwargs.get("with_bags") for user in of.node.users)
        module.prepare_to_send(of.sharding.world_size, collection.ids_on_host and not copies)
    return module


def _dedup_ids(of: Lowered) -> DedupIds:
    deduped = names_in(of.node, "deduped")
    keys = [table.name in deduped for table in of.collection.tables for _ in table.embedding_names]
    return DedupIds(keys, of.collection.ids_on_host)


def _bucketize(of: Lowered) -> Bucketize:
    cut = [table for table in of.sharding.tables for _ in table.table.embedding_names]
    indexed = [sharded.table.hashing if sharded.table.has_index else None for sharded in cut]
    routes = Routes(
        row_borders=[sharded.row_borders() for sharded in cut],
        rows=[sharded.table.num_embeddings for sharded in cut],
        dense_rows=[0 if config is None else config.dense_rows for config in indexed],
        buckets=[0 if config is None else config.buckets for config in indexed],
        seeds=[0 if config is None else config.seed for config in indexed],
        sources=_sources(of),
        pieces=[shard.piece for shard in of.sharding.by_rank() for _ in shard.table.embedding_names],
    )
    says_origins, on_host = not of.collection.is_pooled, of.collection.ids_on_host
    return Bucketize(routes, list(of.collection.sent_keys), says_origins, on_host)


def _input_dist_start(of: Lowered) -> InputDistStart:
    collection, sharding, group = of.collection, of.sharding, of.groups.ids
    by_rank = [sharding.on_rank(rank) for rank in range(sharding.world_size)]
    splits = [sum(len(shard.table.embedding_names) for shard in shards) for shards in by_rank]
    positions = _sources(of) if of.graph.puts_keys_into_order(of.node) else None
    is_weighted = collection.is_weighted and sharding.world_size > 1
    keys, rows_return = list(collection.sent_keys), not collection.is_pooled
    device, number = sent_on(group), of.groups.number
    return InputDistStart(group, splits, positions, keys, collection.name, device, is_weighted, rows_return, number)


def _sources(of: Lowered) -> list[int]:
    """The position, among the keys of the selected ids, of each key that arrives somewhere."""
    positions = of.collection.keys.positions
    return [positions[name] for shard in of.sharding.by_rank() for name in shard.table.embedding_names]


def _indexes_in_use(of: Lowered) -> HashIds:
    """The module that hashes in the form of the graph that trains, whose indexes and counts a node shares."""
    (hash_ids,) = of.runtime.of("hash_ids")
    return hash_ids


def _find_rows(of: Lowered) -> FindRows:
    to_host, to_device = (next(iter(of.runtime.of(kind)), None) for kind in ("to_host", "to_device"))
    return FindRows(_indexes_in_use(of), to_host, to_device, tuple(of.runtime.of("lookup")))


def _hash_ids(of: Lowered) -> HashIds:
    collection, hashed = of.collection, names_in(of.node, "hashed")
    group = None if of.runtime.groups is None else of.runtime.groups.pooled
    is_alone = len(of.graph.hashing(collection.name)) == 1
    evicting = [table.name for table in collection.local if table.evicts]
    if evicting and not is_alone:
        raise ConversionError(
            f"several nodes hash ids, but table {evicting[0]!r} evicts: the ids of all tables must be hashed together, "
            "because the rows of a batch are kept together.",
            reason="several_hash_ids",
            module_path=collection.name,
            what_to_do="let the operator take the ids of all tables; or leave it out.",
        )
    indexes = TableIndexes(collection.name, collection.local, hashed, of.runtime.store, group)
    return HashIds(indexes)


def _lookup(of: Lowered) -> Lookup:
    fused = of.runtime.of("hash_lookup")
    if fused and not of.graph.of_kind("hash_lookup"):  # another form of the graph does in one step what two do here
        return fused[0].lookup
    collection, combine = of.collection, str(of.node.kwargs["combine"])
    tables, keys = of.graph.tables(of.node), collection.local_keys
    module = Lookup(collection.name, tables, combine, keys, collection.is_weighted, of.runtime.store, of.backend)
    if "kernel" in of.node.kwargs:
        module.choose_kernel(str(of.node.kwargs["kernel"]))
    return module


def _hash_lookup(of: Lowered) -> HashLookup:
    hash_ids, lookup = _hash_ids(of), _lookup(of)
    for module, kind in ((hash_ids, "hash_ids"), (lookup, "lookup")):
        module.label = node_name(of.collection.name, kind)
        of.runtime.add(f"{of.node.name}.{kind}", kind, module)
    return HashLookup(hash_ids, lookup)


def _output_dist_start(of: Lowered) -> OutputDistStart:
    hop = of.graph.hop(of.node)
    parts = [of.graph.columns(node) for node in of.node.all_input_nodes[:-1]]
    device = of.runtime.store.device
    if of.collection.is_pooled:
        return POOLED_STARTS[hop.operation](hop, of.groups, parts, device)
    keys = RowKeys.of(of.sharding, of.collection.way(str(of.node.kwargs["way"])), parts)
    return ROW_STARTS[hop.operation](hop, of.groups, keys, device)


def _expand_rows(of: Lowered) -> ExpandRows:
    positions = of.collection.keys.positions
    return ExpandRows([positions[columns.key] for columns in of.graph.columns(of.node)])


def _mean_divide(of: Lowered) -> MeanDivide:
    divided, keys = names_in(of.node, "divided"), of.collection.keys
    return MeanDivide(of.graph.tables(of.node), divided, keys, of.graph.columns(of.node))


def _keyed_tensor(of: Lowered) -> AssembleKeyedTensor:
    parts = [of.graph.columns(node) for node in of.node.all_input_nodes]
    return AssembleKeyedTensor(list(of.collection.keys), embedding_dims(of.collection.tables), parts)


def _jagged_dict(of: Lowered) -> AssembleJaggedDict:
    parts = [[columns.key for columns in of.graph.columns(node)] for node in of.node.all_input_nodes[:-1]]
    is_sharded = of.collection.sharding is not None
    return AssembleJaggedDict(list(of.collection.keys), parts, of.collection.need_indices, all_train=is_sharded)


MAKERS: dict[str, Callable[[Lowered], NodeModule]] = {
    "select_features": _select_features,
    "dedup_ids": _dedup_ids,
    "bucketize": _bucketize,
    "input_dist_start": _input_dist_start,
    "input_dist_wait": lambda of: InputDistWait(rows_return=not of.collection.is_pooled),
    "to_host": lambda of: ToHost(with_bags=bool(of.node.kwargs.get("with_bags"))),
    "hash_ids": _hash_ids,
    "snapshot_indexes": lambda of: SnapshotIndexes(_indexes_in_use(of)),
    "find_ids": lambda of: FindIds(_indexes_in_use(of)),
    "insert_ids": lambda of: InsertIds(_indexes_in_use(of)),
    "find_rows": _find_rows,
    "to_device": lambda of: ToDevice(of.runtime.store),
    "lookup": _lookup,
    "hash_lookup": _hash_lookup,
    "output_dist_start": _output_dist_start,
    "output_dist_wait": lambda of: OutputDistWait(),
    "expand_rows": _expand_rows,
    "mean_divide": _mean_divide,
    "keyed_tensor": _keyed_tensor,
    "jagged_dict": _jagged_dict,
}
"""What makes the module of each kind of node. A new kind is one line."""

OWN_MAKERS: dict[str, Callable[[Lowered], nn.Module]] = {}
"""What makes the module of each operator that the user has declared with ``recfx.add_operator``."""
