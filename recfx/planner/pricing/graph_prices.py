"""Prices a graph of operators: what each node costs follows from the graph and its context alone.

Kinds of nodes are known by their declarations, and by their formulas, so an operator of the user's is priced like all
others. A node of a graph of modules is priced by the operator that it was made from.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import sympy
import torch
from torch import fx, nn

from recfx.collections.compile_graph import context_now
from recfx.collections.converted_collection import ConvertedCollection
from recfx.hashing import HashIndex, ResolvedHashConfig
from recfx.ir.context import CollectionContext, TableFacts
from recfx.ir.meta import BATCH, Collective, find_module
from recfx.ir.node_kinds import NODE_KINDS, ValueType
from recfx.ir.node_values import meta_of_value
from recfx.ir.operator_graph import OperatorGraph, lowered_from
from recfx.ir.tables import TableSpec
from recfx.optim.rules import rule_named
from recfx.planner.pricing.formulas import work_of
from recfx.planner.pricing.node_facts import SYMBOLS, NodeFacts, Symbols, TableLoad, Values
from recfx.planner.pricing.work import NO_RESIDENT, NOTHING, NodeCost, Resident, Work, total
from recfx.runtime.assemble import keyed_order
from recfx.runtime.lookup import Lookup
from recfx.runtime.table_store import TableStore

DENSE = "dense"
"""The kind of what recfx did not make."""


def bytes_once(tensors: Iterable[torch.Tensor], counted: set[int]) -> int:
    """The bytes of those tensors that are not among the ``counted`` yet, by ``id``; then they are."""
    new = {id(tensor): tensor.nbytes for tensor in tensors if id(tensor) not in counted}
    counted.update(new)
    return sum(new.values())


def resident_of(table: TableSpec, facts: TableFacts) -> Resident:
    """What a table, or a shard of one, would keep; the state of its optimizer is as it is after the first step."""
    rows, columns, state, index = table.num_embeddings, table.embedding_dim, 0, 0
    rule = None if facts.optimizer is None else rule_named(facts.optimizer.rule)
    if rule is not None:
        state = sum(4 * math.prod(tensor.shape(rows, columns)) for tensor in rule.states)
        state += 4 if rule.counts_steps else 0
    if table.hashing is not None and table.has_index:
        index = _index_bytes(table.hashing, table.first_row, table.first_row + rows)
    return Resident(rows * columns * facts.dtype.itemsize, state, index)


@functools.lru_cache(maxsize=4096)
def _index_bytes(config: ResolvedHashConfig, first_row: int, end_row: int) -> int:
    index = HashIndex(config.rows, config=config, device="meta", row_begin=first_row, row_end=end_row)
    return sum(buffer.nbytes for buffer in index.buffers())


class GraphPrices:
    """Prices nodes of one graph; ``store`` has the tables that are here, and ``counted`` what is not counted again."""

    def __init__(
        self,
        graph: OperatorGraph,
        trains: bool,
        counted: set[int] | None = None,
        store: TableStore | None = None,
        symbols: Symbols | Values = SYMBOLS,
    ) -> None:
        self.graph, self.trains, self.store, self.symbols = graph, trains, store, symbols
        self.counted = set[int]() if counted is None else counted
        self.metas = {node: meta_of_value(graph, node) for node in graph.operators}
        collections = graph.context.collections
        self._load = functools.cache(lambda name, table: load_of(collections[name], table, symbols))

    def nodes(self, calls: int = 1) -> list[NodeCost]:
        """What each node costs, in order; nodes that only take items of a value are left out."""
        return [self.cost(node, calls) for node in self.metas]

    def cost(self, node: fx.Node, calls: int = 1) -> NodeCost:
        """What a node costs, if a step runs it so often."""
        meta, number = self.metas[node], self.symbols.number
        forward, backward = work_of(self._facts(node), number)
        sent = tuple(
            replace(call, bytes=number(call.bytes)) for call in meta.collectives if self.trains or not call.backward
        )
        named = (node.name, meta.kind, meta.collection, meta.tables, meta.device, meta.kernel)
        return NodeCost(*named, forward, backward, sent, self._resident(node), calls, meta.on_host)

    def _facts(self, node: fx.Node) -> NodeFacts:
        """What the formula of a node's kind is given. A value of two dimensions is rows; others are counted in ids."""
        meta, collection, number = self.metas[node], self.graph.collection(node), self.symbols.number
        kind, has_rows = NODE_KINDS[meta.kind], len(meta.shape) == 2
        loads = tuple(self._load(collection.name, table) for table in self.graph.tables(node))
        rows = [giver for giver in node.all_input_nodes if giver in self.metas and len(self.metas[giver].shape) == 2]
        orders_columns = ValueType.KEYED_TENSOR in kind.outputs and rows
        of_ids = kind.name == "output_dist_wait" and not collection.is_pooled  # of different ones, maybe
        return NodeFacts(
            kind=kind.name, tables=loads,
            ids=total(load.ids for load in loads) if has_rows and not of_ids else number(meta.shape[0]),
            bags=total(load.bags for load in loads), value_bytes=number(meta.bytes) if has_rows else 0,
            is_weighted=collection.is_weighted, is_pooled=collection.is_pooled,
            ranges=keyed_order(collection.keys, list(map(self.graph.columns, rows))).ranges if orders_columns else 1,
            rows=number(meta.shape[0]),
            moves=kind.outputs[0] is not ValueType.IDS_IN_FLIGHT or self.graph.puts_keys_into_order(node),
            trains=self.trains,
        )  # fmt: skip

    def _resident(self, node: fx.Node) -> Resident:
        """What tables keep, at the node that looks them up, and what their indexes do, at that which hashes."""
        once, collection, resident = NODE_KINDS[self.graph.kind(node)].once, self.graph.collection(node), NO_RESIDENT
        for table in self.graph.tables(node) if once else ():
            store, kept = self.store, resident_of(table, collection.facts_of(table))
            if "lookup" in once and (store is None or bytes_once([store.weight(table.name)], self.counted)):
                resident += replace(kept, index=0)
            if "hash_ids" in once:  # an index that was loaded may keep more than a new one
                here = store is not None and table.name in store.indexes
                own = bytes_once(store.index(table.name).buffers(), self.counted) if store and here else kept.index
                resident += Resident(index=own)
        return resident


def load_of(collection: CollectionContext, table: TableSpec, symbols: Symbols | Values) -> TableLoad:
    """What a batch does to a table, or to a shard, which gets the ids of all ranks; all rows are equally likely."""
    facts, whole = collection.facts_of(table), collection.by_name(local=False)[table.table_name]
    samples = symbols.batch * symbols.world if table.shard_of else symbols.batch
    lengths = total(map(symbols.length, table.sent_lengths if table.shard_of else table.feature_names))
    ids = samples * lengths * symbols.number(sympy.Rational(table.num_embeddings, whole.num_embeddings))
    rule = None if facts.optimizer is None else rule_named(facts.optimizer.rule)
    return TableLoad(table, ids, samples, table.embedding_dim * facts.dtype.itemsize, rule, facts.is_trained)


def costs_of_shard(collection: CollectionContext, shard: TableSpec, trains: bool, calls: int = 1) -> list[NodeCost]:
    """The part that one shard has in the nodes of its rank that look up and hash, without what it keeps."""
    load, costs = load_of(collection, shard, SYMBOLS), []
    for kind in ["lookup", *(["hash_ids"] if shard.has_index else [])]:
        facts = NodeFacts(
            kind, (load,), load.ids, load.bags, trains=trains,
            is_weighted=collection.is_weighted, is_pooled=collection.is_pooled,
        )  # fmt: skip
        node = (kind, kind, collection.name, (shard.name,), collection.device, "", *work_of(facts, sympy.sympify))
        costs.append(NodeCost(*node, (), NO_RESIDENT, calls, collection.copies_ids and kind != "lookup"))
    return costs


class ModelPrices:
    """Prices the nodes of one or more graphs of one model."""

    def __init__(self, trains: bool) -> None:
        self._trains = trains
        self.counted = set[int]()

    def nodes_of(self, graph_module: fx.GraphModule, calls: int = 1) -> list[NodeCost]:
        """What each node of a graph costs, in order; nodes that only take items of a value are left out."""
        run = [(node, lowered_from(node), find_module(graph_module, node)) for node in graph_module.graph.nodes]
        stores = {  # the tables that are here, by the graph whose lookups read them
            id(operator.graph): part.store
            for _, operator, module in run
            if operator is not None and module is not None
            for part in module.modules()
            if isinstance(part, Lookup)
        }
        prices, costs = dict[int, GraphPrices](), []
        for node, operator, module in run:
            if operator is not None and module is not None:
                graph, key = operator.graph, id(operator.graph)
                if key not in prices:
                    contexts, store = graph.context.collections, stores.get(key)
                    if store is not None:  # the tables may have changed since the graph was made
                        contexts = {name: context_now(context, store) for name, context in contexts.items()}
                        graph = OperatorGraph(graph.graph, replace(graph.context, collections=contexts))
                    prices[key] = GraphPrices(graph, self._trains, self.counted, store)
                costs.append(replace(prices[key].cost(operator.node, calls), name=node.name))
            elif module is not None:
                costs.append(self.dense(node.name, module, calls))
        return costs

    def rest(self, model: nn.Module, collections: Sequence[nn.Module], world_size: int) -> list[NodeCost]:
        """A model around its collections; nothing if it is one of them."""
        if any(collection is model for collection in collections) or isinstance(model, ConvertedCollection):
            return []
        return [self.dense(DENSE, model), *(self.dense_all_reduce(model, collections) if world_size > 1 else ())]

    def dense(self, name: str, module: nn.Module, calls: int = 1) -> NodeCost:
        """What recfx did not make: only its linear layers count as work, each of them called once per sample."""
        work = NOTHING.mapped(sympy.sympify)
        for layer in module.modules():
            if isinstance(layer, nn.Linear) and isinstance(layer.weight, nn.Parameter):
                size, element = layer.weight.numel(), layer.weight.element_size()
                work += Work(
                    read_bytes=size * element + BATCH * layer.in_features * element,
                    written_bytes=BATCH * layer.out_features * element,
                    flops=2 * BATCH * size + BATCH * layer.out_features,
                )
        backward = work + work if self._trains else NOTHING.mapped(sympy.sympify)
        device = next((parameter.device.type for parameter in module.parameters()), "")
        resident = Resident(weights=bytes_once([*module.parameters(), *module.buffers()], self.counted))
        return NodeCost(name, DENSE, "", (), device, "", work, backward, (), resident, calls)

    def dense_all_reduce(self, model: nn.Module, collections: Sequence[nn.Module]) -> list[NodeCost]:
        """The averaging over ranks of the gradients of all parameters outside ``collections``, if there are any."""
        own = {id(table) for collection in collections for table in collection.parameters()}
        trained = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in own]
        if not (self._trains and trained):
            return []
        size = sympy.Integer(sum(parameter.nbytes for parameter in trained))
        nothing, device = NOTHING.mapped(sympy.sympify), trained[0].device.type
        calls = (Collective("all_reduce", size, backward=True),)
        return [NodeCost("dense_all_reduce", DENSE, "", (), device, "", nothing, nothing, calls, NO_RESIDENT)]
