"""The tables of a collection, converted or not."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface

from recfx.drawing.drawing import DrawnTable
from recfx.ir.tables import TableSpec
from recfx.modules.converted_collection import ConvertedCollection
from recfx.nodes import SelectFeatures


def drawn_tables(module: nn.Module) -> tuple[DrawnTable, ...]:
    """The tables, in order; none if the module does not say.

    Args:
        module: a collection, or the graph of a converted one.
    """
    if isinstance(module, ConvertedCollection):
        return tuple(_of_spec(spec) for spec in module.tables)
    if isinstance(module, fx.GraphModule):
        selects = [child for child in module.children() if isinstance(child, SelectFeatures)]
        return tuple(_of_spec(spec) for select in selects[:1] for spec in select.tables)
    read = {EmbeddingBagCollectionInterface: "embedding_bag_configs", EmbeddingCollectionInterface: "embedding_configs"}
    for interface, name in read.items():
        if isinstance(module, interface):
            try:
                return tuple(_of_config(config) for config in getattr(module, name)())
            except Exception:  # a foreign class may implement none of this; then the picture has less to show
                return ()
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
