"""Every sharding type, alone and mixed, against the unsharded standard model."""

from __future__ import annotations

import pytest

from tests.sharding.cases import check, train_sharded
from tests.sharding.ranks import ranks
from tests.sharding.typical_cases import TYPES, one_type


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_a_type_alone_equals_the_unsharded_model(kind: str, world_size: int) -> None:
    case = one_type(kind, local_size=2 if world_size == 4 else 0)
    check(case, world_size, ranks(world_size).run(train_sharded, case))
