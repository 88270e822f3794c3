"""Reads a graph: what each of its nodes costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import sympy
from torch import fx, nn

from recfx.ir.meta import BATCH, WORLD, Collective, node_meta
from recfx.ir.tables import TableSpec
from recfx.ir.typed_access import find_module, meta_of, node_module
from recfx.modules.converted_collection import ConvertedCollection
from recfx.nodes import AssembleKeyedTensor, Bucketize, HashLookup, InputDistStart, Lookup, SelectFeatures, TableStore
from recfx.pricing.dense import dense_phases
from recfx.pricing.formulas import formula_of
from recfx.pricing.node_facts import NodeFacts, TableLoad
from recfx.pricing.node_parts import store_of, tables_of
from recfx.pricing.residents import Residents, tensor_bytes
from recfx.pricing.work import NO_RESIDENT, NOTHING, NodeCost, Resident

DENSE = "dense"
"""The kind of what recfx did not make."""

DENSE_ALL_REDUCE = "dense_all_reduce"
"""The name of the line that averages its gradients over ranks."""


class GraphReader:
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
            graph_module: the graph of a collection, or of a whole model.
            calls: how often a step runs it.
        """
        selects = _known_collections(graph_module)
        found = []
        for node in graph_module.graph.nodes:
            meta, module = node_meta(node), find_module(graph_module, node)
            if meta is not None:
                found.append(self._made_by_recfx(graph_module, node, selects.get(meta.collection), calls))
            elif module is not None:
                found.append(self.dense(node.name, module, calls))
        return found

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

    def _made_by_recfx(
        self, graph_module: fx.GraphModule, node: fx.Node, select: SelectFeatures | None, calls: int
    ) -> NodeCost:
        meta, module = meta_of(node), find_module(graph_module, node)
        facts = self._facts(graph_module, node, module, select)
        phases = formula_of(meta.kind)(facts)
        collectives = tuple(each for each in meta.collectives if self._trains or not each.backward)
        return NodeCost(
            name=node.name,
            kind=meta.kind,
            collection=meta.collection,
            tables=meta.tables,
            device=meta.device,
            kernel=meta.kernel,
            forward=phases.forward.symbolic(),
            backward=phases.backward.symbolic(),
            collectives=collectives,
            resident=self._resident(module),
            calls=calls,
        )

    def _facts(
        self, graph_module: fx.GraphModule, node: fx.Node, module: Any, select: SelectFeatures | None
    ) -> NodeFacts:
        meta = meta_of(node)
        specs, store = tables_of(module), store_of(module)
        rows = {} if select is None else {table.name: table.num_embeddings for table in select.tables}
        loads = tuple(_load(spec, rows, store) for spec in specs)
        keys = len(module.keys) if isinstance(module, (Bucketize, InputDistStart)) else 0
        # A value of one dimension is counted in ids.
        ids = meta.shape[0] if len(meta.shape) == 1 else sympy.Add(*(load.ids for load in loads))
        return NodeFacts(
            kind=meta.kind,
            tables=loads,
            ids=ids,
            bags=sympy.Add(*(load.bags for load in loads)) if loads else _bags(graph_module, node, select),
            sent_bags=BATCH * keys,
            value_bytes=meta.bytes if len(meta.shape) == 2 else 0,
            is_weighted=select is not None and select.is_weighted,
            parts=sum(1 for each in node.all_input_nodes if _is_pooled(each)),
            ranges=module.order.ranges if isinstance(module, AssembleKeyedTensor) else 1,
            rows=meta.shape[0],
            moves=not isinstance(module, InputDistStart) or module.positions is not None,
            trains=self._trains,
        )

    def _resident(self, module: Any) -> Resident:
        found, store = Resident(), store_of(module)
        if store is None:
            return found
        for spec in tables_of(module):
            if isinstance(module, (Lookup, HashLookup)):
                found += self.residents.of_table(store, spec.name)
            if not isinstance(module, Lookup):
                found += self.residents.of_index(store, spec.name)
        return found


def graphs_of(model: nn.Module) -> Iterable[ConvertedCollection]:
    """The converted collections of ``model``, each once, in its order."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, ConvertedCollection) and id(module) not in seen:
            seen.add(id(module))
            yield module


def table_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of the tables in ``model``: of converted collections, and of the nodes of a graph."""
    for module in model.modules():
        store = store_of(module)
        if isinstance(module, ConvertedCollection):
            yield from module.parameters()
        elif store is not None:
            yield from (parameter for bag in store.bags.values() for parameter in bag.parameters())


def _known_collections(graph_module: fx.GraphModule) -> dict[str, SelectFeatures]:
    """What each collection's first node knows of it, by collection."""
    modules = (find_module(graph_module, node) for node in graph_module.graph.nodes)
    return {module.collection: module for module in modules if isinstance(module, SelectFeatures)}


def _load(spec: TableSpec, rows: dict[str, int], store: TableStore | None) -> TableLoad:
    of_table = rows.get(spec.table_name, spec.num_embeddings)
    if store is None or spec.name not in store.bags:
        return TableLoad.of(spec, of_table, spec.embedding_dim * spec.dtype.itemsize)
    weight, optimizer = store.weight(spec.name), store.optimizers.get(spec.name)
    rule = None if optimizer is None else optimizer.rule
    return TableLoad.of(spec, of_table, weight.shape[1] * weight.element_size(), rule, weight.requires_grad)


def _bags(graph_module: fx.GraphModule, node: fx.Node, select: SelectFeatures | None) -> sympy.Expr:
    """The bags of a node whose module names no tables."""
    if meta_of(node).kind == "input_dist_wait":
        item = node.all_input_nodes[0]
        start = node_module(graph_module, item.all_input_nodes[0], InputDistStart)
        return WORLD * BATCH * start.arriving
    return BATCH * (0 if select is None else len(select.keys))


def _is_pooled(node: fx.Node) -> bool:
    meta = node_meta(node)
    return meta is not None and len(meta.shape) == 2
