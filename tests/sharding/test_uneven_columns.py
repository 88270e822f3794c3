"""Tables that are cut into column blocks of different widths, with and without an index."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import recfx
from tests.sharding.cases import Case, Table, check, train_sharded, train_whole
from tests.sharding.ranks import ranks

CASE = Case(
    (
        Table("a", 24, 12, ("f0", "f1"), "MEAN", ("column_sizes", 4, 8)),
        Table("b", 20, 20, ("f1",), "SUM", ("column_sizes", 4, 16)),
        Table("c", 24, 16, ("f2",), "MEAN", ("column_sizes", 12, 4)),
    ),
    optimizer="adagrad",
)


def test_adopted() -> None:
    check(CASE, 2, ranks(2).run(train_sharded, CASE))


@pytest.mark.parametrize("admit_after", [1, 2])
def test_hashed_means_are_divided_by_the_lengths_of_their_own_bags(admit_after: int) -> None:
    hashing = recfx.HashConfig(dense_rows=0, admit_after=admit_after)
    case = replace(CASE, hashing=hashing, raw_ids=10)
    expected, whole = train_whole(case, 2)
    answers = ranks(2).run(train_sharded, case)
    check(case, 2, answers, expected=expected)
    for answer in answers:
        for name, (_, index) in answer["indexes"].items():
            assert torch.equal(index["row_ids"], whole.index(name).row_ids)
