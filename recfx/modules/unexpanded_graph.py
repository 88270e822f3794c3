"""The graph of a collection before the first pass."""

from __future__ import annotations

from torch import fx
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.ir.meta import NodeMeta, SourceLocation, annotate
from recfx.ir.names import node_name
from recfx.ir.tables import TableSpec
from recfx.nodes.resources import Resources
from recfx.nodes.unexpanded import UnexpandedCollection


def make_unexpanded_graph(
    collection: str,
    tables: tuple[TableSpec, ...],
    is_weighted: bool,
    resources: Resources,
    source: SourceLocation | None,
) -> fx.GraphModule:
    """Input, the collection as one leaf, output; the arguments are those of :class:`UnexpandedCollection`."""
    leaf = UnexpandedCollection(collection, tables, is_weighted, resources, source)
    graph = fx.Graph()
    features = graph.create_node("placeholder", "features", type_expr=KeyedJaggedTensor, name="features")
    node = graph.create_node("call_module", "collection", (features,), {}, name=node_name(collection, "collection"))
    names = tuple(table.name for table in tables)
    annotate(node, NodeMeta("collection", collection, "discovery", source=source, tables=names))
    graph.output(node)
    return fx.GraphModule({"collection": leaf}, graph)
