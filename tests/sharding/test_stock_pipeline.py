"""TorchRec's own pipelines over sharded collections: the same bits as step by step, and really pipelined."""

from __future__ import annotations

import pytest

from tests.sharding.cases import Case, Table, check, train_whole
from tests.sharding.pipelined import assert_same, train
from tests.sharding.ranks import ranks
from tests.sharding.test_hashed import hashed_case
from tests.sharding.test_types import one_type

MIXED = (
    Table("a", 11, 8, ("f0",), "SUM", ("table_wise", 1)),
    Table("b", 5, 16, ("f1", "f0"), "MEAN", ("row_wise",)),
    Table("c", 7, 8, ("f2",), "MEAN", ("data_parallel",)),
    Table("d", 9, 16, ("f1",), "SUM", ("column_wise", 0, 1)),
)
WEIGHTED = tuple(Table(t.name, t.rows, t.dim, t.features, "SUM", t.sharding) for t in MIXED)
STATIC = {
    "table_wise": one_type("table_wise"),
    "row_wise": one_type("row_wise"),
    "data_parallel": one_type("data_parallel"),
    "mixed": Case(MIXED, optimizer="adagrad"),
    "mixed_dense": Case(MIXED, kernel="dense"),
    "weighted": Case(WEIGHTED, is_weighted=True),
    "uneven": Case(MIXED, sizes=(4, 1)),
}
HASHED = {
    "hashed_table_wise": hashed_case("table_wise", "error", sizes=(3, 5)),
    "hashed_row_wise": hashed_case("row_wise", "share"),
    "hashed_data_parallel": hashed_case("data_parallel", "partly_dense", sizes=(3, 5)),
    "evicting": hashed_case("row_wise", "lru"),
    "admitting": hashed_case("table_wise", "lfu_admit"),
}
CASES = {**STATIC, **HASHED}


@pytest.mark.parametrize("form", ["alone", "wrapped"])
@pytest.mark.parametrize("name", CASES)
def test_the_sparse_dist_pipeline_changes_no_bit(name: str, form: str) -> None:
    case = CASES[name]
    expected = ranks(2).run(train, case, "loop", form)
    found = ranks(2).run(train, case, "sparse_dist", form)
    assert [answer["forwards"] for answer in found] == [["PipelinedForward"]] * 2
    assert [answer["reported"] for answer in expected + found] == [[False]] * 2 + [[True]] * 2
    assert_same(found, expected)
    unsharded = train_whole(case, 2, 5)[0] if name in HASHED else None
    check(case, 2, found, rtol=1e-4, atol=1e-5, expected=unsharded)


@pytest.mark.parametrize("modes", ["ttttt", "ttette", "e"])
@pytest.mark.parametrize("form", ["alone", "two"])
@pytest.mark.parametrize("name", ["mixed", "hashed_table_wise", "evicting", "admitting"])
def test_collections_that_share_features_and_steps_in_eval_mode(name: str, form: str, modes: str) -> None:
    expected = ranks(2).run(train, CASES[name], "loop", form, modes)
    found = ranks(2).run(train, CASES[name], "sparse_dist", form, modes)
    assert {kind for answer in found for kind in answer["forwards"]} == {"PipelinedForward"}
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["mixed", "hashed_row_wise"])
def test_the_base_pipeline_changes_no_bit(name: str) -> None:
    expected = ranks(2).run(train, CASES[name], "loop")
    assert_same(ranks(2).run(train, CASES[name], "base"), expected)
