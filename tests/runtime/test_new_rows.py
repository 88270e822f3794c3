"""Rows that get a new id: what is written into them, once, and what happens to those that cannot be filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import DataType

import recfx
from recfx.errors import InputError
from tests.builders.batches import bags, one_bag
from tests.builders.optimizers import attach

EVICT = recfx.HashConfig(dense_rows=0, on_full="evict", buckets=1)


def model_of(
    *names: str, rows: int = 4, init_fn: Callable[[torch.Tensor], object] | None = None, **more: Any
) -> recfx.HashEmbeddingBagCollection:
    configs = [
        recfx.HashEmbeddingBagConfig(
            name=name, feature_names=[f"f{name}"], embedding_dim=4, num_embeddings=rows, init_fn=init_fn, hashing=EVICT,
            **more,
        )
        for name in names
    ]  # fmt: skip
    model = recfx.HashEmbeddingBagCollection(configs)
    attach(model, "sgd")
    return model


def step(model: recfx.HashEmbeddingBagCollection, *ids: list[int]) -> None:
    names = [f"f{table.name}" for table in model.tables]
    model(bags({name: [table_ids] for name, table_ids in zip(names, ids, strict=True)})).values().sum().backward()


class Filling:
    """An ``init_fn`` that writes how often it was called, or fails."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.fails = False

    def __call__(self, weight: torch.Tensor) -> None:
        if self.fails:
            raise ValueError("out of numbers")
        self.shapes.append(tuple(weight.shape))
        weight.data.fill_(len(self.shapes))


@pytest.mark.parametrize("kind", [DataType.FP32, DataType.FP16])
def test_only_rows_that_were_used_before_are_filled_again(kind: DataType) -> None:
    """In their own type and place, whatever the defaults are."""
    fill = Filling()
    model = model_of("t", init_fn=fill, data_type=kind)
    for group in model.fused_optimizers().values():
        group.group["lr"] = 0.0
    first, second = one_bag(1, 2, 3, feature="ft"), one_bag(1, 5, 6, feature="ft")
    with torch.device("meta"):
        model(first).values().sum().backward()
        assert fill.shapes == [(4, 4)]
        model(second).values().sum().backward()  # takes a row that was never used, and one of 2 and 3
    assert fill.shapes == [(4, 4), (1, 4)]
    rows = model.index("t").find(torch.tensor([1, 5, 6]))
    assert sorted(model.weight("t")[rows, 0].tolist()) == [1.0, 1.0, 2.0]
    assert model.weight("t").dtype == {DataType.FP32: torch.float32, DataType.FP16: torch.float16}[kind]


def test_a_single_new_row_is_initialised_and_others_are_left_alone() -> None:
    model = model_of("t", "u", rows=6)
    step(model, [1, 2], [7])
    for name in "tu":
        model.weight(name).data.fill_(9.0)
    step(model, [1, 3], [7])
    row = int(model.index("t").find(torch.tensor([3])))
    is_new = (model.weight("t").detach().abs() <= 1).all(dim=1)
    assert is_new.tolist() == [number == row for number in range(6)]
    assert bool((model.weight("u") > 8).all())
    assert not model.index("t").has_uninitialized_rows
    assert not model.index("u").has_uninitialized_rows


def test_marks_are_removed_for_every_table_of_a_batch() -> None:
    model = model_of("t", "u", "v", rows=8)
    for ids in (([1], [2, 3], [4, 5, 6]), ([7, 8], [], [9]), ([], [10], [11])):
        step(model, *ids)
        assert [model.index(name).has_uninitialized_rows for name in "tuv"] == [False] * 3
        for name in "tuv":
            model.weight(name).data.fill_(9.0)
        step(model, *ids)
        assert all(bool((model.weight(name) > 8).all()) for name in "tuv"), "nothing is initialised again"


def test_the_error_of_an_init_fn_names_the_collection() -> None:
    fill = Filling()
    model = torch.nn.ModuleDict({"ebc": model_of("t", init_fn=fill)})
    model = recfx.convert(model)  # gives the collection its path
    step(model["ebc"], [1, 2, 3, 4])  # type: ignore[arg-type]
    fill.fails = True
    with pytest.raises(InputError, match=r"table 't' cannot fill 2 rows.*ValueError: out of numbers") as caught:
        step(model["ebc"], [1, 5, 6])  # type: ignore[arg-type]
    assert caught.value.reason == "init_fn_failed"
    assert "any number of rows" in caught.value.what_to_do
    assert isinstance(caught.value.__cause__, ValueError)
