"""quantize_rows: lookups read rows as they will be stored, in the dtype that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from recfx.ir.meta import annotate
from recfx.ir.tables import TableSpec
from recfx.ir.typed_access import meta_of, node_module
from recfx.nodes import Lookup
from recfx.passes._nodes import nodes_of_kind
from recfx.passes.base import PassResult
from recfx.serving import SCRIPT, ServingTarget


@dataclass(frozen=True)
class QuantizeRows:
    """Change the dtype of tables in the graph; the rows themselves are written when the file is.

    Args:
        dtypes: the dtype of stored rows, by collection and table; others keep theirs.
        target: says which module pools rows.
    """

    dtypes: Mapping[str, Mapping[str, torch.dtype]] = field(default_factory=dict)
    target: ServingTarget = SCRIPT
    name: str = "quantize_rows"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        found = nodes_of_kind(graph_module, "lookup")
        for node in found:
            module = node_module(graph_module, node, Lookup)
            tables = tuple(self._stored(module.collection, table) for table in module.tables)
            pool = self.target.pool(tables, module.pooling, module.features, module.is_weighted)
            pool.label = node.name
            graph_module.add_submodule(str(node.target), pool)
            annotate(node, replace(meta_of(node), kernel=pool.kernel))
        return PassResult(graph_module, modified=bool(found))

    def _stored(self, collection: str, table: TableSpec) -> TableSpec:
        dtype = self.dtypes.get(collection, {}).get(table.name, table.dtype)
        return table if dtype == table.dtype else replace(table, dtype=dtype)
