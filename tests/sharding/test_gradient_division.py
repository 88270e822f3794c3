"""``torchrec.distributed.comm_ops.set_gradient_division(False)``: gradients are summed over ranks, not averaged."""

from __future__ import annotations

import copy

import pytest
import torch
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division

from tests.sharding.cases import Case, batches, build, shard
from tests.sharding.ranks import ranks
from tests.sharding.typical_cases import TYPES, one_type


def moved(rank: int, world_size: int, case: Case, division: bool) -> list[tuple[str, torch.Tensor]]:
    """How far one step of SGD moves this rank's shards."""
    before = get_gradient_division()
    set_gradient_division(division)
    try:
        standard, _ = build(case)
        sharded = shard(case, standard, world_size)
        own = [(each.name, sharded._store.weight(each.name)) for each in sharded.sharding.local()]
        old = copy.deepcopy([weight.detach() for _, weight in own])
        values = sharded(batches(case, world_size, 1)[0][rank]).values()
        (values * torch.linspace(-1, 2, values.numel()).view_as(values)).sum().backward()
        return [(name, weight.detach() - start) for (name, weight), start in zip(own, old, strict=True)]
    finally:
        set_gradient_division(before)


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_one_step(kind: str) -> None:
    world_size = 2
    case = one_type(kind)
    averaged, summed = (ranks(world_size).run(moved, case, division) for division in (True, False))
    for one, other in zip(averaged, summed, strict=True):
        assert [name for name, _ in one] == [name for name, _ in other]
        for (_, by_mean), (_, by_sum) in zip(one, other, strict=True):
            torch.testing.assert_close(by_sum, by_mean * world_size, rtol=1e-5, atol=1e-6)
    assert any(bool(change.any()) for answer in averaged for _, change in answer)
