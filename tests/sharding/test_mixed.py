"""Mixed plans: types drawn at random in one collection, features shared across types, SUM, MEAN and weighted."""

from __future__ import annotations

import random

import pytest

from tests.sharding.cases import Case, Table, check, train_sharded
from tests.sharding.ranks import ranks


def random_case(number: int, world_size: int) -> Case:
    """One of the plans; the number decides."""
    draw = random.Random(number)
    is_weighted = number % 4 == 3
    kinds = ["data_parallel", "table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise"]
    tables = []
    for position in range(draw.randint(3, 7)):
        kind = "grid_shard" if draw.random() < 0.15 else draw.choice(kinds)
        dim = 256 if kind == "grid_shard" else draw.choice([8, 16, 24])
        on: tuple[int, ...] = ()
        if kind == "table_wise":
            on = (draw.randrange(world_size),)
        elif kind in ("column_wise", "table_column_wise"):
            on = (draw.randrange(world_size), draw.randrange(world_size))
        elif kind == "table_row_wise":
            on = (draw.randrange(2),)
        elif kind == "grid_shard":
            on = (draw.randrange(2), draw.randrange(2))
        features = tuple(draw.sample([f"f{i}" for i in range(6)], draw.choice([1, 1, 2])))
        pooling = "SUM" if is_weighted else draw.choice(["SUM", "MEAN"])
        tables.append(Table(f"t{position}", draw.randint(1, 20), dim, features, pooling, (kind, *on)))
    return Case(
        tuple(tables),
        optimizer=draw.choice(["sgd", "adagrad", "adam"]),
        kernel=draw.choice(["fused", "fused", "dense"]),
        is_weighted=is_weighted,
        sizes=draw.choice([(3,), (4, 1), (2, 0, 3)]),
        local_size=2 if world_size == 4 else 0,
        seed=number,
    )


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_random_mixed_plan_equals_the_unsharded_model(number: int, world_size: int) -> None:
    case = random_case(number + 100 * world_size, world_size)
    check(case, world_size, ranks(world_size).run(train_sharded, case), rtol=1e-4, atol=1e-5)
