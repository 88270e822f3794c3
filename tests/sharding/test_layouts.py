"""Sharded collections exchange batches and gradients that lie in memory in any way as if they were contiguous."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor

import recfx
from tests.builders.optimizers import attach
from tests.sharding.cases import Case, Table, as_sequence, shard_converted
from tests.sharding.ranks import ranks
from tests.support.layouts import LAYOUTS, contiguous, laid_out

KEYS = ["a", "b"]


def different(rank: int, world_size: int, sharding: str, kind: str) -> list[tuple[str, str]]:
    """Layouts, and what has them, with which two steps answer something else than with contiguous tensors."""
    on = {"table_wise": (0,), "column_wise": (0, 1)}.get(sharding, ())
    case = Case(tuple(Table(key, 20, 8, (key,), "SUM", (sharding, *on)) for key in KEYS))
    case = as_sequence(case) if kind == "sequence" else case

    def trained(features: KeyedJaggedTensor, layout: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        standard: Any = (
            EmbeddingCollection([table.sequence_config() for table in case.tables])
            if kind == "sequence"
            else EmbeddingBagCollection([table.config() for table in case.tables], is_weighted=kind == "weighted")
        )
        converted: Any = recfx.convert(standard)
        attach(converted, torch.optim.SGD, lr=0.5)
        sharded = shard_converted(case, converted, world_size)
        outputs = []
        for _ in range(2):
            answer: Any = sharded(features)
            is_pooled = kind != "sequence"
            out = answer.values() if is_pooled else torch.cat([answer[key].values() for key in KEYS])
            out.backward(layout(torch.linspace(-1, 1, out.numel()).view(out.shape)))
            outputs.append(out.detach())
        return outputs

    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 20, (16,), generator=draw)
    features = KeyedJaggedTensor(KEYS, ids, torch.rand(16, generator=draw), torch.full((8,), 2))
    wrong = []
    for name, layout in LAYOUTS.items():
        for part in ("values", "lengths", "weights"):

            def as_contiguous(tensor: torch.Tensor, layout: Any = layout) -> torch.Tensor:
                return contiguous(layout(tensor))

            actual = trained(laid_out(features, part, layout), layout)
            expected = trained(laid_out(features, part, as_contiguous), as_contiguous)
            if not all(map(torch.equal, actual, expected)):
                wrong.append((name, part))
    return wrong


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        ("pooled", "data_parallel"), ("pooled", "column_wise"), ("weighted", "row_wise"), ("weighted", "table_wise"),
        ("sequence", "row_wise"), ("sequence", "table_wise"),
    ],
)  # fmt: skip
def test_ranks_exchange_any_layout(kind: str, sharding: str) -> None:
    assert ranks(2).run(different, sharding, kind) == [[], []]
