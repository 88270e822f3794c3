"""A pass and an operator of your own: gradients are clipped bag by bag, before the optimizer in the backward uses them.

``torch.nn.utils.clip_grad_norm_`` cannot do this: with an optimizer in the backward, tables have no ``.grad``. Here an
operator stands behind every lookup. It hands the pooled rows on, and limits the norm of their gradients.

    python examples/own_pass.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim import apply_optimizer_in_backward

import recfx
from recfx.ir import Input, NodeKind, Stage, ValueType
from recfx.ir.operator_graph import OperatorGraph
from recfx.passes import Pass, PassResult
from recfx.planner.pricing.node_facts import NodeFacts
from recfx.planner.pricing.work import Phases, Work
from recfx.planner.topology import npu_topology


class Clip(torch.autograd.Function):
    """Hands ``[B, D]`` values on, and limits the norm of each row of their gradient."""

    @staticmethod
    def forward(ctx: Any, pooled: torch.Tensor, max_norm: float) -> torch.Tensor:
        ctx.max_norm = max_norm
        return pooled.view_as(pooled)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.renorm(2, 0, ctx.max_norm), None


class ClipGradients(nn.Module):
    """What runs for the operator. In an exported file there is no backward, and nothing to do."""

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self.max_norm = max_norm

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_scripting():
            return pooled
        clipped: torch.Tensor = Clip.apply(pooled, self.max_norm)
        return clipped


def price(facts: NodeFacts) -> Phases:
    """Nothing in the forward; the backward reads the gradients twice, and writes them."""
    size = facts.value_bytes
    return Phases(Work(), Work(read_bytes=2 * size, written_bytes=size, flops=size))


recfx.add_operator(
    NodeKind(
        "clip_gradients",
        "limits the norm of the gradient of each sample's pooled rows",
        inputs=(Input((ValueType.POOLED,)),),
        stage=Stage.LOOKUP,
        like_input=True,
        attributes={"max_norm": float},
    ),
    make=lambda of: ClipGradients(of.attributes["max_norm"]),
    price=price,
)


@dataclass(frozen=True)
class InsertClipGradients:
    """The pass: ``clip_gradients`` after every lookup."""

    max_norm: float
    name: str = "insert_clip_gradients"

    def call(self, graph: OperatorGraph) -> PassResult:
        for lookup in graph.of_kind("lookup", "hash_lookup"):
            collection = graph.collection(lookup).name
            with graph.graph.inserting_after(lookup):
                clip = graph.add("clip_gradients", (lookup,), collection, max_norm=self.max_norm)
            graph.replace(lookup, clip)
        return PassResult(graph)


class Model(nn.Module):
    """Two tables, and a layer over them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        users = EmbeddingBagConfig(name="users", embedding_dim=8, num_embeddings=1000, feature_names=["user"])
        movies = EmbeddingBagConfig(name="movies", embedding_dim=8, num_embeddings=500, feature_names=["movie"])
        self.ebc = EmbeddingBagCollection([users, movies])
        self.over = nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values()).squeeze(1)


# Two samples, with one id of either feature each
BATCH = KeyedJaggedTensor(["user", "movie"], torch.tensor([3, 4, 7, 8]), lengths=torch.ones(4, dtype=torch.int64))


def longest_step(passes: Sequence[Pass]) -> float:
    """How far one step of SGD with a large loss moves a row of ``users``."""
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 1.0})
    model = recfx.convert(model, passes=passes)
    weight = model.ebc.weight("users").detach()
    before = weight.clone()
    (1e3 * model(BATCH).sum()).backward()
    return float((weight - before).norm(dim=1).max())


def main() -> None:
    """Convert with the pass, and look at the result in every way that there is."""
    passes = [*recfx.passes(), InsertClipGradients(max_norm=0.5)]
    model = recfx.convert(Model(), (BATCH,), passes=passes)  # also compares it with the original
    print(model.ebc.pass_records[-1].text)
    print(f"a step moves a row by {longest_step(recfx.passes()):.1f}, with the pass by {longest_step(passes):.1f}")
    print(recfx.explain(model))
    nodes = {node.name: node for node in recfx.cost(model).nodes}
    print("the operator's backward reads", nodes["ebc_clip_gradients"].backward.read_bytes, "bytes")
    print(recfx.plan(model, npu_topology(2)))
    with tempfile.TemporaryDirectory() as folder:
        recfx.draw(model, Path(folder, "model.html"))
        recfx.export(model, Path(folder, "model.pt"), (BATCH,))
        torch.testing.assert_close(recfx.load(Path(folder, "model.pt"))(BATCH), model.eval()(BATCH))
    print("drawn, exported, and loaded again: the answers are equal")


if __name__ == "__main__":
    main()
