"""Prices a graph of operators: what each node costs follows from the graph and its context alone.

Kinds of nodes are known by their declarations, and by their formulas, so an operator of the user's is priced like all
others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import sympy
from torch import fx, nn

from recfx.collections.compile_graph import context_now
from recfx.ir.context import CollectionContext
from recfx.ir.meta import BATCH, Collective, NodeMeta, find_module
from recfx.ir.node_kinds import NODE_KINDS, NodeKind, ValueType
from recfx.ir.node_values import meta_of_value
from recfx.ir.operator_graph import OperatorGraph, lowered_from
from recfx.ir.tables import TableSpec
from recfx.planner.pricing.formulas import formula_of
from recfx.planner.pricing.node_facts import NodeFacts, PlannedNode, TableLoad
from recfx.planner.pricing.residents import Residents, rule_of, tensor_bytes
from recfx.planner.pricing.work import NO_RESIDENT, NOTHING, NodeCost, Phases, Resident, Work
from recfx.runtime import Lookup, TableStore
from recfx.runtime.keyed_tensor import keyed_order

_SENT = (ValueType.ROUTED_IDS, ValueType.IDS_IN_FLIGHT)


def price_graph(graph: OperatorGraph, trains: bool, calls: int = 1) -> list[NodeCost]:
    """What each node of a graph costs, in order; nodes that only take items of a value are left out.

    Args:
        graph: after the last pass, or between two.
        trains: whether a step has a backward.
        calls: how often a step runs it.

    Raises:
        ConversionError: ``kind_without_cost``.
    """
    prices = GraphPrices(graph, trains)
    return [prices.cost(node, calls) for node in graph.operators]


def nodes_of(graph: OperatorGraph, trains: bool) -> list[PlannedNode]:
    """The nodes that ``price_graph`` prices, before their formulas are asked; it has the same arguments."""
    prices = GraphPrices(graph, trains)
    return [prices.node(node) for node in graph.operators]


class GraphPrices:
    """Prices nodes of one graph.

    Args:
        graph: the graph.
        trains: whether a step has a backward.
        residents: what was counted already, of which nothing is counted again.
        store: the tables that are here; None if none are.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        trains: bool,
        residents: Residents | None = None,
        store: TableStore | None = None,
    ) -> None:
        self.graph, self.trains, self.store = graph, trains, store
        self.residents = Residents() if residents is None else residents
        self.metas: Mapping[fx.Node, NodeMeta] = {node: meta_of_value(graph, node) for node in graph.operators}
        self.loads: dict[tuple[str, TableSpec], TableLoad] = {}

    def cost(self, node: fx.Node, calls: int = 1) -> NodeCost:
        """What a node costs, if a step runs it so often.

        Raises:
            ConversionError: ``kind_without_cost``.
        """
        meta, found = self.metas[node], self.node(node)
        phases = formula_of(meta.kind)(found.facts)
        return NodeCost(
            name=found.name,
            kind=meta.kind,
            collection=meta.collection,
            tables=found.tables,
            device=meta.device,
            kernel=meta.kernel,
            forward=phases.forward.symbolic(),
            backward=phases.backward.symbolic(),
            collectives=found.collectives,
            resident=found.resident,
            calls=calls,
            on_host=found.on_host,
        )

    def node(self, node: fx.Node) -> PlannedNode:
        """A node before its formula is asked."""
        meta = self.metas[node]
        collectives = tuple(each for each in meta.collectives if self.trains or not each.backward)
        return PlannedNode(node.name, meta.tables, self.facts(node), collectives, self.resident(node), meta.on_host)

    def facts(self, node: fx.Node) -> NodeFacts:
        """What the formulas know of a node. A value of two dimensions is pooled rows; others are counted in ids."""
        meta, collection = self.metas[node], self.graph.collection(node)
        kind = NODE_KINDS[meta.kind]
        loads = tuple(self.load(collection, table) for table in self.graph.tables(node))
        is_pooled = len(meta.shape) == 2
        sends = kind.outputs[0] in _SENT and collection.sharding is not None
        puts_into_order = kind.outputs[0] is not ValueType.IDS_IN_FLIGHT or self.graph.puts_keys_into_order(node)
        return NodeFacts(
            kind=kind.name,
            tables=loads,
            ids=sympy.Add(*(load.ids for load in loads)) if is_pooled else meta.shape[0],
            bags=sympy.Add(*(load.bags for load in loads)),
            sent_bags=BATCH * len(collection.sent_keys) if sends else 0,
            value_bytes=meta.bytes if is_pooled else 0,
            is_weighted=collection.is_weighted,
            parts=len(self.pooled_inputs(node)),
            ranges=self.ranges(node, kind, collection),
            rows=meta.shape[0],
            moves=puts_into_order,
            trains=self.trains,
        )

    def load(self, collection: CollectionContext, table: TableSpec) -> TableLoad:
        key = (collection.name, table)
        if key not in self.loads:
            facts, whole = collection.facts_of(table), collection.by_name(local=False)[table.table_name]
            row_bytes, rule = table.embedding_dim * facts.dtype.itemsize, rule_of(facts)
            self.loads[key] = TableLoad.of(table, whole.num_embeddings, row_bytes, rule, facts.is_trained)
        return self.loads[key]

    def pooled_inputs(self, node: fx.Node) -> list[fx.Node]:
        metas = self.metas
        return [each for each in node.all_input_nodes if each in metas and len(metas[each].shape) == 2]

    def ranges(self, node: fx.Node, kind: NodeKind, collection: CollectionContext) -> int:
        """The ranges of columns that a node puts into the order of the output."""
        parts = self.pooled_inputs(node)
        if ValueType.KEYED_TENSOR not in kind.outputs or not parts:
            return 1
        return keyed_order(collection.keys, [self.graph.columns(each) for each in parts]).ranges

    def resident(self, node: fx.Node) -> Resident:
        """What the node's tables keep, at the node that looks them up, and what their indexes do, at that which hashes.

        Either is done once per table.
        """
        once, found = NODE_KINDS[self.graph.kind(node)].once, Resident()
        collection = self.graph.collection(node)
        for table in self.graph.tables(node) if once else ():
            if "lookup" in once:
                found += self.residents.of_table(table, collection.facts_of(table), self.store)
            if "hash_ids" in once:
                found += self.residents.of_index(table, self.store)
        return found


def dense_phases(module: nn.Module, trains: bool) -> Phases:
    """The linear layers inside ``module``, each called once per sample.

    Args:
        module: any module.
        trains: whether there is a backward, which does twice as much.
    """
    parts = []
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and isinstance(layer.weight, nn.Parameter):
            size, element = layer.weight.numel(), layer.weight.element_size()
            parts.append(
                Work(
                    read_bytes=sympy.Integer(size * element) + BATCH * layer.in_features * element,
                    written_bytes=BATCH * layer.out_features * element,
                    flops=2 * BATCH * size + BATCH * layer.out_features,
                )
            )
    forward = Work.total(parts)
    return Phases(forward, forward + forward) if trains else Phases(forward)


DENSE = "dense"
"""The kind of what recfx did not make."""

DENSE_ALL_REDUCE = "dense_all_reduce"
"""The name of the line that averages its gradients over ranks."""


class ModelPrices:
    """Prices the nodes of one or more graphs of one model.

    Args:
        trains: whether steps have a backward.
    """

    def __init__(self, trains: bool) -> None:
        self._trains = trains
        self.residents = Residents()

    def nodes_of(self, graph_module: fx.GraphModule, calls: int = 1) -> list[NodeCost]:
        """What each node of a graph costs, in order; nodes that only take items of a value are left out.

        Args:
            graph_module: the graph of a collection, or of a whole model, or a part of one.
            calls: how often a step runs it.

        Raises:
            ConversionError: ``kind_without_cost``, ``unsupported_bag``.
        """
        stores, prices = _stores(graph_module), dict[int, GraphPrices]()
        found = []
        for node in graph_module.graph.nodes:
            operator, module = lowered_from(node), find_module(graph_module, node)
            if module is None:
                continue
            if operator is None:
                found.append(self.dense(node.name, module, calls))
                continue
            graph = id(operator.graph)
            if graph not in prices:
                prices[graph] = self._prices(operator.graph, stores.get(graph))
            found.append(replace(prices[graph].cost(operator.node, calls), name=node.name))
        return found

    def _prices(self, graph: OperatorGraph, store: TableStore | None) -> GraphPrices:
        """The prices of a graph whose tables may have changed since it was made."""
        if store is not None:
            now = {name: context_now(each, store) for name, each in graph.context.collections.items()}
            graph = OperatorGraph(graph.graph, replace(graph.context, collections=now))
        return GraphPrices(graph, self._trains, self.residents, store)

    def dense(self, name: str, module: nn.Module, calls: int = 1) -> NodeCost:
        """What recfx did not make: only its linear layers count as work."""
        phases = dense_phases(module, self._trains)
        device = next((parameter.device.type for parameter in module.parameters()), "")
        resident = self.residents.of_dense(module)
        return NodeCost(
            name, DENSE, "", (), device, "", phases.forward.symbolic(), phases.backward.symbolic(), (), resident, calls
        )

    def dense_all_reduce(self, model: nn.Module, tables: Iterable[nn.Parameter]) -> list[NodeCost]:
        """The averaging of the gradients of what recfx did not make over ranks, if there are any.

        Args:
            model: what is trained.
            tables: the parameters of the collections.
        """
        own = {id(parameter) for parameter in tables}
        trained = [each for each in model.parameters() if each.requires_grad and id(each) not in own]
        if not (self._trains and trained):
            return []
        size = sympy.Integer(sum(tensor_bytes(parameter) for parameter in trained))
        nothing, device = NOTHING.symbolic(), trained[0].device.type
        calls = (Collective("all_reduce", size, backward=True),)
        return [NodeCost(DENSE_ALL_REDUCE, DENSE, "", (), device, "", nothing, nothing, calls, NO_RESIDENT)]


def _stores(graph_module: fx.GraphModule) -> dict[int, TableStore]:
    """The tables that are here, by the ``id`` of the graph of operators whose lookups read them."""
    found: dict[int, TableStore] = {}
    for node in graph_module.graph.nodes:
        operator, module = lowered_from(node), find_module(graph_module, node)
        if operator is not None and module is not None:
            lookups = (each for each in module.modules() if isinstance(each, Lookup))
            found |= {id(operator.graph): lookup.store for lookup in lookups}
    return found
