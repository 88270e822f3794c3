"""Sharded collections exchange batches and gradients that lie in memory in any way as if they were contiguous."""

from typing import Any

import pytest
import torch

import recfx
from tests.builders.optimizers import attach
from tests.sharding.cases import Case, Table, shard_converted
from tests.sharding.ranks import on_ranks
from tests.support.layouts import LAYOUTS, batch_of_two, contiguous, laid_out, standard, trained


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        ("pooled", "data_parallel"), ("pooled", "column_wise"), ("weighted", "row_wise"), ("weighted", "table_wise"),
        ("sequence", "row_wise"), ("sequence", "table_wise"),
    ],
)  # fmt: skip
@on_ranks(2)
def test_ranks_exchange_any_layout(rank: int, world_size: int, kind: str, sharding: str) -> None:
    """Layouts, and what has them, with which two steps leave something else than with contiguous tensors."""
    on = {"table_wise": (0,), "column_wise": (0, 1)}.get(sharding, ())
    tables = tuple(Table(name, 20, 8, (key,), "SUM", (sharding, *on)) for name, key in (("t", "a"), ("u", "b")))

    def collection() -> Any:
        converted: Any = recfx.convert(standard(kind))
        attach(converted, torch.optim.SGD, lr=0.5)
        return shard_converted(Case(tables, is_pooled=kind != "sequence"), converted, world_size)

    features, wrong = batch_of_two(rank), []
    for name, layout in LAYOUTS.items():
        for part in ("values", "lengths", "weights"):

            def as_contiguous(tensor: torch.Tensor, layout: Any = layout) -> torch.Tensor:
                return contiguous(layout(tensor))

            actual = trained(collection(), laid_out(features, part, layout), layout)
            expected = trained(collection(), laid_out(features, part, as_contiguous), as_contiguous)
            if not all(map(torch.equal, actual, expected)):
                wrong.append((name, part))
    assert wrong == []
