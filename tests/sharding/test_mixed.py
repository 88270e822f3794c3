"""Mixed plans: types drawn at random in one collection, features shared across types, SUM, MEAN and weighted."""

from __future__ import annotations

import pytest

from tests.sharding.cases import check, train_sharded
from tests.sharding.ranks import ranks
from tests.sharding.typical_cases import random_case


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_random_mixed_plan_equals_the_unsharded_model(number: int, world_size: int) -> None:
    case = random_case(number + 100 * world_size, world_size)
    check(case, world_size, ranks(world_size).run(train_sharded, case), rtol=1e-4, atol=1e-5)
