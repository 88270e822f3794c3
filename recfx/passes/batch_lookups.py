"""batch_lookups: one table-batched lookup for tables that one kernel call can serve.

Tables share a call when dtype, device, pooling and optimizer settings are equal. Their ``mean_divide`` nodes become one
as well; ``keyed_tensor`` puts the columns back into the standard order where a group is not adjacent.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from recfx.ir.meta import node_meta
from recfx.ir.tables import TableSpec, embedding_dims, embedding_names
from recfx.nodes import AssembleKeyedTensor, Lookup, MeanDivide
from recfx.nodes.base import NodeModule
from recfx.passes._nodes import add_node, node_name, nodes_of_kind, remove_node
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class BatchLookups:
    """Merge the lookups of every ``keyed_tensor`` by what a kernel call needs equal."""

    name: str = "batch_lookups"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        modified = False
        for output in nodes_of_kind(graph_module, "keyed_tensor"):
            groups: dict[Hashable, list[fx.Node]] = {}
            for pooled in output.all_input_nodes:
                groups.setdefault(_group_key(_lookup(graph_module, pooled)), []).append(pooled)
            if len(groups) < len(output.all_input_nodes):
                self._merge(graph_module, output, list(groups.values()))
                modified = True
        return PassResult(graph_module, modified)

    def _merge(self, graph_module: fx.GraphModule, output: fx.Node, groups: list[list[fx.Node]]) -> None:
        old_inputs = list(output.all_input_nodes)
        meta = node_meta(output)
        assert meta is not None
        merged, parts = [], []
        with graph_module.graph.inserting_before(output):
            for group in groups:
                members = [_lookup(graph_module, pooled) for pooled in group]
                tables = tuple(table for member in members for table in member.tables)
                rows = _lookup_node(graph_module, group[0]).all_input_nodes[0]
                first = members[0]
                module = Lookup(first.collection, tables, first.pooling, first.features, first.is_weighted, first.store)
                pooled = add_node(graph_module, "lookup", module, (rows,), meta, tables, self.name)
                merged.append(self._merge_divisions(graph_module, group, pooled, tables, first.features))
                parts.append(embedding_names(tables))
            every_table = {table.name: table for old in old_inputs for table in _lookup(graph_module, old).tables}
            ordered = tuple(every_table[name] for name in meta.tables)
            assemble = AssembleKeyedTensor(embedding_names(ordered), embedding_dims(ordered), parts)
            replacement = add_node(graph_module, "keyed_tensor", assemble, tuple(merged), meta, ordered, self.name)
        output.replace_all_uses_with(replacement)
        remove_node(graph_module, output)
        for old in old_inputs:
            lookup = _lookup_node(graph_module, old)
            remove_node(graph_module, old)
            if lookup is not old:
                remove_node(graph_module, lookup)
        _renumber(graph_module)

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
            module = graph_module.get_submodule(str(node.target))
            if isinstance(module, MeanDivide):
                divided += module.divided
                lengths = node.all_input_nodes[1]
        if lengths is None:
            return pooled
        meta = node_meta(pooled)
        assert meta is not None
        module = MeanDivide(tables, tuple(divided), features)
        return add_node(graph_module, "mean_divide", module, (pooled, lengths), meta, tables, self.name)


def _lookup_node(graph_module: fx.GraphModule, pooled: fx.Node) -> fx.Node:
    module = graph_module.get_submodule(str(pooled.target))
    return pooled.all_input_nodes[0] if isinstance(module, MeanDivide) else pooled


def _lookup(graph_module: fx.GraphModule, pooled: fx.Node) -> Lookup:
    module = graph_module.get_submodule(str(_lookup_node(graph_module, pooled).target))
    assert isinstance(module, Lookup)
    return module


def _group_key(lookup: Lookup) -> Hashable:
    (table,) = lookup.tables
    weight, optimizer = lookup.store.weight(table.name), lookup.store.optimizers.get(table.name)
    settings = None if optimizer is None else optimizer.settings()
    return weight.dtype, weight.device, lookup.pooling, settings


def _renumber(graph_module: fx.GraphModule) -> None:
    """Number the merged nodes from the start again: the names that they replaced are free now."""
    for kind in ("lookup", "mean_divide", "keyed_tensor"):
        nodes = nodes_of_kind(graph_module, kind)
        modules = [graph_module.get_submodule(str(node.target)) for node in nodes]
        for node in nodes:
            graph_module.delete_submodule(str(node.target))
        for number, (node, module) in enumerate(zip(nodes, modules, strict=True)):
            meta = node_meta(node)
            assert meta is not None
            assert isinstance(module, NodeModule)
            node.target = kind if number == 0 else f"{kind}_{number}"
            graph_module.add_submodule(node.target, module)
            node.name = module.label = node_name(meta.collection, node.target)
        graph_module.meta["recfx_numbers"][kind] = len(nodes) - 1
