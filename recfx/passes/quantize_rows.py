"""quantize_rows: lookups read rows as they will be stored, in the dtype that was asked for.

It is not one of ``recfx.passes()``: it makes graphs for files. The rows themselves are written when the file is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from recfx.ir.operator_graph import OperatorGraph
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class QuantizeRows:
    """Says on every ``lookup`` in which dtype the rows of its tables are stored.

    ``dtypes`` are by collection and table; others keep theirs.
    """

    dtypes: Mapping[str, Mapping[str, torch.dtype]] = field(default_factory=dict)
    name: str = "quantize_rows"

    def call(self, graph: OperatorGraph) -> PassResult:
        for node in graph.of_kind("lookup"):
            tables, dtypes = graph.tables(node), self.dtypes.get(graph.collection(node).name, {})
            stored = tuple(dtypes.get(table.name, table.dtype) for table in tables)
            if stored != tuple(table.dtype for table in tables):
                graph.change(node, stored=stored)
        return PassResult(graph)
