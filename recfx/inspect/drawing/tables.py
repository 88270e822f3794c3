"""The tables of a collection, converted or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx, nn

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import shown_by
from recfx.inspect.drawing.drawing import DrawnTable
from recfx.ir.operator_graph import lowered_from
from recfx.ir.tables import TableSpec


def tables_of_specs(specs: Iterable[TableSpec]) -> tuple[DrawnTable, ...]:
    """The tables of a collection that is converted, or planned."""
    return tuple(map(_of_spec, specs))


def drawn_tables(module: nn.Module) -> tuple[DrawnTable, ...]:
    """The tables, in order; none if the module does not say.

    Args:
        module: a collection, or the graph of a converted one.
    """
    if isinstance(module, ConvertedCollection):
        return tables_of_specs(module.tables)
    if isinstance(module, fx.GraphModule):
        operators = (lowered_from(node) for node in module.graph.nodes)
        one = next((each for each in operators if each is not None), None)
        return () if one is None else tables_of_specs(one.graph.collection(one.node).tables)
    names = shown_by(module)
    if names is None:
        return ()
    try:
        return tuple(_of_config(config) for config in getattr(module, names[0])())
    except Exception:  # a foreign class may implement none of this; then the picture has less to show
        return ()


def _of_spec(spec: TableSpec) -> DrawnTable:
    hashing = "static" if spec.hashing is None else "index" if spec.has_index else "adopted"
    dtype = str(spec.dtype).removeprefix("torch.")
    return DrawnTable(
        spec.name, spec.feature_names, spec.num_embeddings, spec.embedding_dim, spec.pooling, dtype, hashing
    )


def _of_config(config: Any) -> DrawnTable:
    pooling = getattr(config, "pooling", None)
    return DrawnTable(
        config.name,
        tuple(config.feature_names),
        config.num_embeddings,
        config.embedding_dim,
        "" if pooling is None else pooling.name,
        config.data_type.name,
        "",
    )
