"""Cases that are trained in pipelines, TorchRec's and recfx's."""

from __future__ import annotations

from tests.sharding.cases import Case, Table
from tests.sharding.typical_cases import hashed_case, one_type

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
