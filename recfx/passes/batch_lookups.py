"""batch_lookups: one table-batched lookup for tables that one kernel call can serve.

Tables share a call when dtype, device, pooling and optimizer settings are equal. Their ``mean_divide`` nodes are merged
as well. If the tables of a group are not adjacent, ``keyed_tensor`` puts the columns back into the standard order.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from torch import fx

from recfx.ir.columns import columns_of
from recfx.ir.meta import annotate, node_meta
from recfx.ir.tables import TableSpec
from recfx.ir.typed_access import find_module, meta_of, node_module
from recfx.nodes import AssembleKeyedTensor, Lookup, MeanDivide, OutputDistStart
from recfx.passes._nodes import add_node, nodes_of_kind, remove_node, renumber
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class BatchLookups:
    """Merge the lookups that lead to the same ``keyed_tensor`` or ``output_dist_start``."""

    name: str = "batch_lookups"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        modified = False
        for kind in ("output_dist_start", "keyed_tensor"):
            for output in nodes_of_kind(graph_module, kind):
                groups: dict[Hashable, list[fx.Node]] = {}
                inputs = [node for node in output.all_input_nodes if _is_pooled(graph_module, node)]
                for pooled in inputs:
                    groups.setdefault(_group_key(_lookup(graph_module, pooled)), []).append(pooled)
                if len(groups) < len(inputs):
                    self._merge(graph_module, output, inputs, list(groups.values()))
                    modified = True
        if modified:
            renumber(graph_module, ("lookup", "mean_divide"))
        return PassResult(graph_module, modified)

    def _merge(
        self, graph_module: fx.GraphModule, output: fx.Node, inputs: list[fx.Node], groups: list[list[fx.Node]]
    ) -> None:
        meta, module = meta_of(output), find_module(graph_module, output)
        if not isinstance(module, OutputDistStart):
            module = node_module(graph_module, output, AssembleKeyedTensor)
        merged, parts = [], []
        with graph_module.graph.inserting_before(output):
            for group in groups:
                members = [_lookup(graph_module, pooled) for pooled in group]
                tables = tuple(table for member in members for table in member.tables)
                rows = tuple(_lookup_node(graph_module, group[0]).all_input_nodes)
                first = members[0]
                lookup = Lookup(first.collection, tables, first.pooling, first.features, first.is_weighted, first.store)
                pooled = add_node(graph_module, "lookup", lookup, rows, meta, tables, self.name)
                merged.append(self._merge_divisions(graph_module, group, pooled, tables, first.features))
                parts.append(columns_of(tables))
        module.take_parts(parts)
        replaced = set(inputs)
        output.args = (*merged, *(node for node in output.all_input_nodes if node not in replaced))
        annotate(output, replace(meta, made_by=self.name))
        for old in inputs:
            lookup_node = _lookup_node(graph_module, old)
            remove_node(graph_module, old)
            if lookup_node is not old:
                remove_node(graph_module, lookup_node)

    def _merge_divisions(
        self,
        graph_module: fx.GraphModule,
        group: list[fx.Node],
        pooled: fx.Node,
        tables: tuple[TableSpec, ...],
        features: tuple[str, ...],
    ) -> fx.Node:
        divided: list[str] = []
        lengths: fx.Node | None = None
        for node in group:
            module = find_module(graph_module, node)
            if isinstance(module, MeanDivide):
                divided += module.divided
                lengths = node.all_input_nodes[1]
        if lengths is None:
            return pooled
        meta = meta_of(pooled)
        module = MeanDivide(tables, tuple(divided), features, columns_of(tables))
        return add_node(graph_module, "mean_divide", module, (pooled, lengths), meta, tables, self.name)


def _is_pooled(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    meta = node_meta(node)
    if meta is not None and meta.kind == "mean_divide":
        return _is_pooled(graph_module, node.all_input_nodes[0])
    return meta is not None and meta.kind == "lookup"


def _lookup_node(graph_module: fx.GraphModule, pooled: fx.Node) -> fx.Node:
    module = find_module(graph_module, pooled)
    return pooled.all_input_nodes[0] if isinstance(module, MeanDivide) else pooled


def _lookup(graph_module: fx.GraphModule, pooled: fx.Node) -> Lookup:
    return node_module(graph_module, _lookup_node(graph_module, pooled), Lookup)


def _group_key(lookup: Lookup) -> Hashable:
    (table,) = lookup.tables
    weight, optimizer = lookup.store.weight(table.name), lookup.store.optimizers.get(table.name)
    settings = None if optimizer is None else optimizer.settings()
    return weight.dtype, weight.device, lookup.pooling, settings
