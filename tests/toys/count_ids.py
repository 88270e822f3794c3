"""A toy pass, and the node that it inserts: ``count_ids`` counts the ids of every feature and hands the batch on."""

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.ir.node_kinds import Input, NodeKind, Stage, ValueType
from recfx.ir.operator_graph import OperatorGraph
from recfx.passes.base import PassResult
from recfx.runtime.base import NodeModule
from recfx.runtime.lowered import Lowered

COUNT_IDS = NodeKind(
    "count_ids",
    "the ids of every feature are counted",
    inputs=(Input((ValueType.IDS,)),),
    outputs=(ValueType.IDS,),
    stage=Stage.SELECT,
    attributes={"keys": tuple},
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


def insert_count_ids(graph: OperatorGraph) -> PassResult:
    """Insert ``count_ids`` after every ``select_features``."""
    for select in graph.of_kind("select_features"):
        collection = graph.collection(select)
        with graph.graph.inserting_after(select):
            graph.replace(select, graph.add("count_ids", (select,), collection.name, keys=tuple(collection.keys)))
    return PassResult(graph)


def make(of: Lowered) -> CountIds:
    """What runs."""
    return CountIds(list(of.node.kwargs["keys"]))  # type: ignore[arg-type]
