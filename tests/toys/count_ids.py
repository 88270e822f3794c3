"""A toy pass, and the node that it inserts: ``count_ids`` counts the ids of every feature and hands the batch on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.ir.node_kinds import Input, NodeKind, Stage, ValueType, size_of_ids
from recfx.ir.typed_access import meta_of, node_module
from recfx.nodes import SelectFeatures
from recfx.nodes.base import NodeModule
from recfx.passes._nodes import add_node, nodes_of_kind
from recfx.passes.base import PassResult

COUNT_IDS = NodeKind(
    "count_ids",
    "the ids of every feature are counted",
    inputs=(Input((ValueType.IDS,)),),
    outputs=(ValueType.IDS,),
    size=size_of_ids,
    stage=Stage.SELECT,
    printed=("keys",),
)


class CountIds(NodeModule):
    """Counts per key, over all batches."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__()
        self.keys = keys
        self.counts = dict.fromkeys(keys, 0)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        for key, count in zip(self.keys, features.length_per_key(), strict=True):
            self.counts[key] += count
        return features


@dataclass(frozen=True)
class InsertCountIds:
    """Insert ``count_ids`` after every ``select_features``."""

    name: str = "insert_count_ids"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        found = nodes_of_kind(graph_module, "select_features")
        for select in found:
            selected = node_module(graph_module, select, SelectFeatures)
            with graph_module.graph.inserting_after(select):
                module = CountIds(list(selected.keys))
                node = add_node(
                    graph_module, "count_ids", module, (select,), meta_of(select), selected.tables, self.name
                )
            select.replace_all_uses_with(node, delete_user_cb=lambda user, own=node: user is not own)  # type: ignore[misc]
        return PassResult(graph_module, modified=bool(found))
