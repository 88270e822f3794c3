"""Makes what files hold from a graph of operators: the same nodes, which call modules that torch can compile."""

from __future__ import annotations

from torch import fx, nn

from recfx.errors import ExportError
from recfx.exporter.serving.assemble import AssembleColumns, AssembleJagged, DivideMeans
from recfx.exporter.serving.pool_rows import PoolRows
from recfx.exporter.serving.targets import ServingTarget
from recfx.ir.context import FrozenIndex
from recfx.ir.node_kinds import NODE_KINDS, ValueType
from recfx.ir.tables import embedding_dims
from recfx.passes.base import Rewriting
from recfx.runtime.lower_graph import OwnNode, lower_graph
from recfx.runtime.lowered import Lowered

_POOLED = {ValueType.POOLED, ValueType.ARRIVED_POOLED, ValueType.DIVIDED}


def lower_served(made: Rewriting, target: ServingTarget) -> fx.GraphModule:
    """Lower the graph of one collection for a file, whose writer fills its rows and slots.

    Raises:
        ExportError: ``operator_not_exported``: a user's operator takes ids or rows.
    """
    graph_module = lower_graph(made.graph, made.metas, lambda of: _module(of, target))
    for node in graph_module.graph.nodes:
        module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, AssembleColumns):  # TorchScript has no variable number of arguments
            node.args = ([*node.args],)
        elif isinstance(module, AssembleJagged):
            node.args = ([*node.args[:-1]], node.args[-1])
    graph_module.recompile()
    return graph_module


def _module(of: Lowered, target: ServingTarget) -> nn.Module:
    """The module of one node."""
    collection, kind = of.collection, of.graph.kind(of.node)
    if kind == "select_features":
        return target.select(collection.name, collection.tables, collection.is_weighted)
    if kind == "find_rows":
        return target.find(collection.tables, _indexes(of))
    if kind == "lookup":
        return _pool(of, target.pool(of.attributes["kernel"]))
    if kind == "hash_lookup":
        assert target.fused is not None
        indexes = _indexes(of)
        return target.fused(_pool(of, PoolRows), {name: indexes[name] for name in of.attributes.get("hashed", ())})
    if kind == "mean_divide":
        return DivideMeans(of.graph.tables(of.node), of.attributes["divided"], tuple(collection.keys))
    if kind == "keyed_tensor":
        parts = [of.graph.columns(node) for node in of.node.all_input_nodes]
        return AssembleColumns(list(collection.keys), embedding_dims(collection.tables), parts)
    if kind == "jagged_dict":
        keys = [[columns.key for columns in of.graph.columns(node)] for node in of.node.all_input_nodes[:-1]]
        return AssembleJagged(list(collection.keys), keys, collection.need_indices)
    return _own(of)


def _pool(of: Lowered, pool: type[PoolRows]) -> PoolRows:
    keys = tuple(of.collection.keys)
    return pool(of.graph.stored(of.node), of.attributes["combine"], keys, of.collection.is_weighted)


def _indexes(of: Lowered) -> dict[str, FrozenIndex]:
    """The frozen index of each table of the collection that has one, by name."""
    return {name: facts.index for name, facts in of.collection.facts.items() if facts.index is not None}


def _own(of: Lowered) -> nn.Module:
    """The module of a user's operator. Ids and rows are other objects in files than in models."""
    kind = NODE_KINDS[of.graph.kind(of.node)]
    refused = {value_type for declared in kind.inputs for value_type in declared.types} - _POOLED
    if refused:
        raise ExportError(
            f"operator {kind.name!r} takes {min(value_type.value for value_type in refused)}, and files have operators "
            "of the user's for pooled rows alone.",
            reason="operator_not_exported",
            module_path=of.collection.name,
            what_to_do="convert the model without the pass that adds it, load the state, and export that.",
        )
    return OwnNode(of).module
