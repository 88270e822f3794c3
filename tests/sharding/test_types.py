"""Every sharding type, alone and mixed, static and hashed in every way, against the unsharded model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division

from tests.sharding.cases import FORMS, Case, batches, build, check, shard, train_sharded, train_whole, values_of
from tests.sharding.ranks import ranks
from tests.sharding.typical_cases import CONFIGS, TYPES, hashed_case, one_type, random_case
from tests.support.pairwise import pairwise


@pairwise(kind=sorted(TYPES), world_size=[2, 4], form=FORMS)
def test_a_type_alone_equals_the_unsharded_model(kind: str, world_size: int, form: str) -> None:
    case = one_type(kind, local_size=2 if world_size == 4 else 0)
    case = FORMS[form](case)
    check(case, world_size, ranks(world_size).run(train_sharded, case))


@pairwise(number=range(6), world_size=[2, 4], form=FORMS)
def test_a_random_mixed_plan_equals_the_unsharded_model(number: int, world_size: int, form: str) -> None:
    case = random_case(number + 100 * world_size, world_size)
    case = FORMS[form](case)
    check(case, world_size, ranks(world_size).run(train_sharded, case), rtol=1e-4, atol=1e-5)


def check_hashed(case: Case, world_size: int, steps: int) -> None:
    answers = ranks(world_size).run(train_sharded, case, steps)
    expected, converted = train_whole(case, world_size, steps)
    check(case, world_size, answers, rtol=1e-4, atol=1e-5, expected=expected)
    for answer in answers:
        for table, ((first, end), state) in answer["indexes"].items():
            for name, whole in converted.index(table).state_dict().items():
                if name not in ("counts", "slice_counts", "identity"):
                    assert torch.equal(state[name], whole[first:end]), f"{name} of table {table}"
            assert int(state["counts"][0]) == steps


@pytest.mark.parametrize("kind", ["data_parallel", "table_wise", "row_wise"])
def test_three_ranks_equal_the_unsharded_model(kind: str) -> None:
    """One table has fewer rows than there are ranks."""
    case = one_type(kind, sizes=(3, 1, 2))
    small = replace(case.tables[1], rows=2)
    case = replace(case, tables=(case.tables[0], small))
    check(case, 3, ranks(3).run(train_sharded, case))


BY_COLUMNS = ["column_wise", "grid_shard", "table_column_wise"]


@pairwise(kind=sorted(set(TYPES) - {*BY_COLUMNS}), config=sorted(CONFIGS), world_size=[2, 4], form=FORMS)
def test_a_hashed_type_equals_one_rank(kind: str, config: str, world_size: int, form: str) -> None:
    case = hashed_case(kind, config, local_size=2 if world_size == 4 else 0, sizes=(3, 5))
    check_hashed(FORMS[form](case), world_size, 6)


@pairwise(kind=BY_COLUMNS, config=sorted(CONFIGS), form=FORMS)
def test_column_shards_of_a_hashed_table_agree(kind: str, config: str, form: str) -> None:
    # Adagrad: row-wise Adagrad keeps its state by column block, which is another rule.
    case = hashed_case(kind, config, local_size=2, sizes=(3, 5))
    check_hashed(FORMS[form](case), 4, 6)


@pairwise(kind=sorted(TYPES), config=["lru", "lfu_admit"], optimizer=["adagrad_from_a_half", "adam"], form=FORMS)
def test_a_dense_kernel_evicts_with_an_ordinary_optimizer(kind: str, config: str, optimizer: str, form: str) -> None:
    world_size = 4 if kind in BY_COLUMNS else 2
    case = hashed_case(kind, config, local_size=2, sizes=(3, 5))
    check_hashed(FORMS[form](replace(case, kernel="dense", optimizer=optimizer)), world_size, 6)


def moved(rank: int, world_size: int, case: Case, division: bool) -> list[tuple[str, torch.Tensor]]:
    """How far one step of SGD moves this rank's shards."""
    before = get_gradient_division()
    set_gradient_division(division)
    try:
        standard, _ = build(case)
        sharded = shard(case, standard, world_size)
        own = [(shard.name, sharded._store.weight(shard.name)) for shard in sharded.sharding.local()]
        old = copy.deepcopy([weight.detach() for _, weight in own])
        values = values_of(sharded(batches(case, world_size, 1)[0][rank]))
        (values * torch.linspace(-1, 2, values.numel()).view_as(values)).sum().backward()
        return [(name, weight.detach() - start) for (name, weight), start in zip(own, old, strict=True)]
    finally:
        set_gradient_division(before)


@pairwise(kind=sorted(TYPES), form=["pooled", "rows sent once"])
def test_one_step(kind: str, form: str) -> None:
    world_size = 2
    case = FORMS[form](one_type(kind))
    averaged, summed = (ranks(world_size).run(moved, case, division) for division in (True, False))
    for means, sums in zip(averaged, summed, strict=True):
        assert [name for name, _ in means] == [name for name, _ in sums]
        for (_, by_mean), (_, by_sum) in zip(means, sums, strict=True):
            torch.testing.assert_close(by_sum, by_mean * world_size, rtol=1e-5, atol=1e-6)
    assert any(bool(change.any()) for answer in averaged for _, change in answer)
