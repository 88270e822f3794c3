"""``mean_divide``: which columns are divided, and by the lengths of which bags."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.modules.embedding_configs import PoolingType

import recfx
from recfx.ir.tables import TableSpec, columns_of
from recfx.runtime.assemble import MeanDivide
from tests.builders.batches import bags
from tests.builders.collections import table

FEATURES = ("a", "b", "c", "d")
BAGS = bags({"a": [[1], [1, 2]], "b": [[1, 2, 3], []], "c": [[], [1, 2, 3, 4]], "d": [[5], [5] * 5]})


def tables() -> dict[str, TableSpec]:
    configs = [
        table(name, features, dim=dim, pooling=PoolingType.MEAN)
        for name, features, dim in (("one", ["a", "b"], 2), ("two", ["c"], 3), ("three", ["d"], 1))
    ]
    return {spec.name: spec for spec in recfx.HashEmbeddingBagCollection(configs).tables}


@pytest.mark.parametrize(
    ("order", "divided", "divisors"),
    [
        (["one", "two", "three"], ["one", "two", "three"], [[1, 1, 3, 3, 1, 1, 1, 1], [2, 2, 1, 1, 4, 4, 4, 5]]),
        (["one", "two", "three"], ["two"], [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 4, 4, 4, 1]]),
        (["one", "two", "three"], ["one"], [[1, 1, 3, 3, 1, 1, 1, 1], [2, 2, 1, 1, 1, 1, 1, 1]]),
        (["three", "two", "one"], ["one", "three"], [[1, 1, 1, 1, 1, 1, 3, 3], [5, 1, 1, 1, 2, 2, 1, 1]]),
        (["two"], ["two"], [[1, 1, 1], [4, 4, 4]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_are_divided_by_the_lengths_of_their_bags(
    order: list[str], divided: list[str], divisors: list[list[int]], dtype: torch.dtype
) -> None:
    specs = tables()
    chosen = tuple(specs[name] for name in order)
    node = MeanDivide(chosen, tuple(divided), FEATURES, columns_of(chosen))
    pooled = torch.rand(2, len(divisors[0]), dtype=dtype)
    means = node(pooled, BAGS)
    assert means.dtype == dtype
    assert torch.equal(means, pooled / torch.tensor(divisors))


class CountsDivisions(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[type-arg]
        if "div" in str(func):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def test_columns_that_are_not_divided_are_left_alone_in_one_piece() -> None:
    specs = tables()
    chosen = (specs["three"], specs["one"], specs["two"])
    node = MeanDivide(chosen, ("two",), FEATURES, columns_of(chosen))
    pooled = torch.rand(2, 8, requires_grad=True)
    with CountsDivisions() as counted:
        joined = node(pooled, BAGS)
    assert counted.shapes == [(2, 3)]
    assert len(joined.grad_fn.next_functions) == 2
