"""Reads graphs of modules, of which each node of recfx's is priced by the operator that it was made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import sympy
from torch import fx, nn

from recfx.collections.compile_graph import context_now
from recfx.ir.find_module import find_module
from recfx.ir.meta import Collective
from recfx.ir.operator_graph import OperatorGraph, lowered_from
from recfx.planner.pricing.dense import dense_phases
from recfx.planner.pricing.graph_prices import GraphPrices
from recfx.planner.pricing.residents import Residents, tensor_bytes
from recfx.planner.pricing.work import NO_RESIDENT, NOTHING, NodeCost
from recfx.runtime import Lookup, TableStore

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
