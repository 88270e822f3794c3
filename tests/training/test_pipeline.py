"""``recfx.TrainPipeline``: the same bits as steps one by one, and what it says and raises."""

from __future__ import annotations

import pytest

from tests.sharding.pipelined import assert_same, train
from tests.sharding.ranks import ranks
from tests.sharding.test_hashed import hashed_case
from tests.sharding.test_stock_pipeline import CASES as STOCK_CASES

CASES = {
    **STOCK_CASES,
    "hashed_error": hashed_case("row_wise", "error", sizes=(3, 5)),
    "hashed_share": hashed_case("table_wise", "share", sizes=(3, 5)),
    "hashed_lru": hashed_case("row_wise", "lru"),
    "hashed_lfu_admit": hashed_case("table_wise", "lfu_admit"),
    "hashed_adopted": hashed_case("row_wise", "adopted"),
}


@pytest.mark.parametrize("form", ["alone", "wrapped", "two"])
@pytest.mark.parametrize("name", CASES)
def test_changes_no_bit(name: str, form: str) -> None:
    expected = ranks(2).run(train, CASES[name], "loop", form, "ttttttt")
    assert_same(ranks(2).run(train, CASES[name], "recfx", form, "ttttttt"), expected)
