"""Every sharding type, alone and mixed, against the unsharded standard model."""

from __future__ import annotations

import pytest

from tests.sharding.cases import Case, Table, check, train_sharded
from tests.sharding.ranks import ranks

TYPES = {
    "data_parallel": ("data_parallel",),
    "table_wise": ("table_wise", 1),
    "column_wise": ("column_wise", 1, 0),
    "table_column_wise": ("table_column_wise", 1, 1),
    "row_wise": ("row_wise",),
    "table_row_wise": ("table_row_wise", 1),
    "grid_shard": ("grid_shard", 0, 1),
}


def one_type(kind: str, **options: object) -> Case:
    dim = 256 if kind == "grid_shard" else 8
    tables = (
        Table("a", 11, dim, ("f0",), "SUM", TYPES[kind]),
        Table("b", 5, dim, ("f1", "f0"), "SUM" if options.get("is_weighted") else "MEAN", TYPES[kind]),
    )
    return Case(tables, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_a_type_alone_equals_the_unsharded_model(kind: str, world_size: int) -> None:
    case = one_type(kind, local_size=2 if world_size == 4 else 0)
    check(case, world_size, ranks(world_size).run(train_sharded, case))
