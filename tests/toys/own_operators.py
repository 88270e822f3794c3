"""A small model, an operator that scales pooled rows, and the pass that adds it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

import recfx
from recfx.ir import Input, NodeKind, Stage, ValueType
from recfx.ir.operator_graph import OperatorGraph
from recfx.passes import PassResult, Rewrite
from recfx.planner.pricing.node_facts import NodeFacts
from recfx.planner.pricing.work import Phases, Work
from tests.toys.count_ids import COUNT_IDS, insert_count_ids, make

COUNTS = Rewrite("insert_count_ids", insert_count_ids)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=10, feature_names=["f"]),
                EmbeddingBagConfig(
                    name="b", embedding_dim=3, num_embeddings=10, feature_names=["g"], pooling=PoolingType.MEAN
                ),
            ]
        )
        self.over = nn.Linear(7, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values())


class Scale(nn.Module):
    """What the operator ``scale`` runs."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled * self.by


SCALE = NodeKind(
    "scale",
    "pooled rows, times a constant",
    inputs=(Input((ValueType.POOLED, ValueType.ARRIVED_POOLED, ValueType.DIVIDED)),),
    stage=Stage.ASSEMBLE,
    like_input=True,
    attributes={"by": float},
)


@dataclass(frozen=True)
class ScaleAll:
    """Multiplies everything that ``keyed_tensor`` takes."""

    by: float
    name: str = "scale_all"

    def call(self, graph: OperatorGraph) -> PassResult:
        for keyed in graph.of_kind("keyed_tensor"):
            for part in keyed.all_input_nodes:
                with graph.graph.inserting_before(keyed):
                    scale = graph.add("scale", (part,), graph.collection(keyed).name, by=self.by)
                keyed.replace_input_with(part, scale)
        return PassResult(graph)


def price_of_scale(facts: NodeFacts) -> Phases:
    return Phases.same(Work(facts.value_bytes, facts.value_bytes, facts.value_bytes / 4))


def declare() -> None:
    recfx.add_operator(COUNT_IDS, make)
    recfx.add_operator(SCALE, lambda of: Scale(of.attributes["by"]), price_of_scale)


def with_counts() -> list[Any]:
    expand, *rest = recfx.passes()
    return [expand, COUNTS, *rest]
