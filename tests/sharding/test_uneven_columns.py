"""Tables that are cut into column blocks of different widths, with and without an index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import recfx
from tests.sharding.cases import Case, Table, check, train_sharded, train_whole
from tests.sharding.ranks import ranks
from tests.sharding.stateful import make, tables_of, train

CASE = Case(
    (
        Table("a", 24, 12, ("f0", "f1"), "MEAN", ("column_sizes", 4, 8)),
        Table("b", 20, 20, ("f1",), "SUM", ("column_sizes", 4, 16)),
        Table("c", 24, 16, ("f2",), "MEAN", ("column_sizes", 12, 4)),
    ),
    optimizer="adagrad",
)
SEQUENCES = Case(
    (
        Table("a", 24, 20, ("f0", "f1"), "SUM", ("column_sizes", 4, 16)),
        Table("b", 20, 20, ("f1",), "SUM", ("column_sizes", 12, 8)),
        Table("c", 24, 20, ("f2",), "SUM", ("column_sizes", 8, 12)),
    ),
    optimizer="adagrad",
    is_pooled=False,
)
OF_BOTH_KINDS = pytest.mark.parametrize("of_kind", [CASE, SEQUENCES], ids=["pooled", "sequence"])


@OF_BOTH_KINDS
def test_adopted(of_kind: Case) -> None:
    check(of_kind, 2, ranks(2).run(train_sharded, of_kind))


@OF_BOTH_KINDS
@pytest.mark.parametrize("admit_after", [1, 2])
def test_hashed_means_are_divided_by_the_lengths_of_their_own_bags(admit_after: int, of_kind: Case) -> None:
    hashing = recfx.HashConfig(dense_rows=0, admit_after=admit_after)
    case = replace(of_kind, hashing=hashing, raw_ids=10)
    expected, whole = train_whole(case, 2)
    answers = ranks(2).run(train_sharded, case)
    check(case, 2, answers, expected=expected)
    for answer in answers:
        for name, (_, index) in answer["indexes"].items():
            assert torch.equal(index["row_ids"], whole.index(name).row_ids)


def cut(*sharding: tuple[Any, ...]) -> Case:
    tables = tuple(replace(table, sharding=kind) for table, kind in zip(CASE.tables, sharding, strict=True))
    return replace(CASE, tables=tables, optimizer="rowwise_adagrad")


def gathered(model: Any) -> dict[str, torch.Tensor]:
    """The sums of each table's optimizer. Collective."""
    return {name.split(".")[0]: value for name, value in tables_of(model).items() if name.endswith(".optimizer.sum")}


def save(rank: int, world_size: int, case: Case, folder: str) -> dict[str, torch.Tensor]:
    model = make(case, world_size)
    train(model, case, rank, world_size, 0, 1)
    recfx.save_checkpoint(model, folder)
    return gathered(model)


def load(rank: int, world_size: int, case: Case, folder: str) -> dict[str, torch.Tensor]:
    model = make(case, world_size, seed=5)
    recfx.load_checkpoint(model, folder)
    return gathered(model)


def test_sums_of_blocks_become_their_mean_weighted_by_columns(tmp_path: Path) -> None:
    """After one step that is what the uncut table has, wherever it is gathered or loaded."""
    uneven = cut(("column_sizes", 4, 8), ("column_sizes", 4, 16), ("column_sizes", 12, 4))
    folder = str(tmp_path)
    whole = make(uneven, 0)
    train(whole, uneven, 0, 0, 0, 1)
    expected = gathered(whole)
    answers = ranks(2).run(save, uneven, folder)
    answers += ranks(2).run(load, cut(("row_wise",), ("table_wise", 1), ("column_sizes", 8, 8)), folder)
    for answer in [*answers, load(0, 0, uneven, folder)]:
        for name, value in expected.items():
            torch.testing.assert_close(answer[name], value, rtol=1e-4, atol=1e-6)
