"""A graph of operators, as the history of its passes reads it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType

from torch import fx

from recfx.ir.meta import NodeMeta
from recfx.ir.node_values import device_of, meta_of_value
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.printer import attributes_text, call_text
from recfx.ir.snapshot import work_of


class ReadOperators:
    """See ``recfx.ir.snapshot.Readable``, also for the methods.

    Args:
        graph: the graph, which may be replaced by another one.
        known: the metadata of its nodes that earlier passes have made, by name.

    Attributes:
        metas: the metadata of its nodes.
    """

    def __init__(self, graph: OperatorGraph, known: Mapping[str, NodeMeta] = MappingProxyType({})) -> None:
        self.graph = graph
        self.metas = {node: known[node.name] for node in graph.operators if node.name in known}
        self._said: dict[fx.Node, Hashable] = {
            node: _says(graph, node) for node in self.metas
        }  # what that was made from
        self._attributes = {node: attributes_text(graph, node) for node in self.metas}  # of the nodes that said that

    @property
    def nodes(self) -> Iterable[fx.Node]:
        found: Iterable[fx.Node] = self.graph.graph.nodes
        return found

    def meta(self, node: fx.Node, is_new: bool, pass_name: str) -> NodeMeta | None:
        if not self.graph.kind(node):
            return None
        known, says = self.metas.get(node), _says(self.graph, node)
        if known is None or self._said[node] != says:
            made = meta_of_value(self.graph, node, pass_name if known is None else known.made_by)
            known = self.metas[node] = made.touched(() if known is None else known.passes)
            self._said[node], self._attributes[node] = says, attributes_text(self.graph, node)
        return known

    def attributes(self, node: fx.Node) -> str:
        return self._attributes.get(node, "")

    def call(self, node: fx.Node) -> str:
        return call_text(self.graph, node)

    def work(self, node: fx.Node) -> frozenset[tuple[str, str]]:
        kind = self.graph.kind(node)
        return work_of(kind, [table.table_name for table in self.graph.tables(node)]) if kind else frozenset()

    def note(self, node: fx.Node, meta: NodeMeta) -> None:
        self.metas[node] = meta


def _says(graph: OperatorGraph, node: fx.Node) -> Hashable:
    """All that the metadata follows from. A copy to the host moves the nodes after it there as well."""
    return device_of(graph, node), tuple(node.all_input_nodes), tuple(node.kwargs.items())
