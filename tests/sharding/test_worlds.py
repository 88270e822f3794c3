"""One model on 1, 2, 3 and 4 ranks: by id the same, and bit for bit where the arithmetic is exact."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.sharding.gather import gather_tables
from recfx.collections.sharding.shard import shard_collection
from tests.builders.optimizers import attach
from tests.sharding.cases import Case, Table, check, plan_of, train_sharded
from tests.sharding.ranks import ranks

SAMPLES = 12  # a step, in all


def dyadic_batch(rank: int, world_size: int, step: int, raw: bool) -> KeyedJaggedTensor:
    """This rank's part of the step's samples, which do not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (2, SAMPLES), generator=generator)
    values = torch.randint(0, 16, (2, SAMPLES, 3), generator=generator)
    mine = range(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    ids = torch.cat([values[key, sample, : lengths[key, sample]] for key in range(2) for sample in mine])
    own = torch.cat([lengths[key, list(mine)] for key in range(2)])
    return KeyedJaggedTensor(["f0", "f1"], (ids - 7) * (2**40 + 1) if raw else ids, lengths=own)


def train_dyadic(rank: int, world_size: int, case: Case, steps: int) -> dict[str, Any]:
    """Weights, gradients and the learning rate are multiples of powers of two: no sum is rounded."""
    torch.manual_seed(0)
    # New rows begin with 0.5.
    configs = [dataclasses.replace(table.config(), weight_init_min=0.5, weight_init_max=0.5) for table in case.tables]
    standard = EmbeddingBagCollection(tables=configs)
    with torch.no_grad():
        for weight in standard.parameters():
            weight.copy_(torch.randint(-64, 65, weight.shape) / 64)
    converted = recfx.convert(standard, hashing=case.hashing)
    assert isinstance(converted, recfx.HashEmbeddingBagCollection)
    attach(converted, torch.optim.SGD, lr=0.5)
    plan = plan_of(case, converted, world_size)
    sharded = shard_collection(converted, plan, ShardingEnv.from_process_group(dist.group.WORLD))
    for step in range(steps):
        pooled = sharded(dyadic_batch(rank, world_size, step, case.hashing is not None)).values()
        # The mean over ranks of sums over their samples, times the number of ranks: the sum over all samples.
        weights = torch.arange(1, pooled.shape[1] + 1) % 5 / 4 * world_size
        (pooled * weights).sum().backward()
    tables = gather_tables(sharded)
    return {"tables": tables} if rank == 0 else {}


@pytest.mark.parametrize("kind", ["data_parallel", "table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("hashing", [None, recfx.HashConfig(dense_rows=0, rows=64, buckets=8)])
def test_the_number_of_ranks_changes_no_bit(kind: str, hashing: recfx.HashConfig | None) -> None:
    on = {"table_wise": (0,), "column_wise": (0, 1)}.get(kind, ())
    tables = (Table("a", 16, 8, ("f0",), "SUM", (kind, *on)), Table("b", 20, 8, ("f1", "f0"), "SUM", (kind, *on)))
    case = Case(tables, hashing=hashing)
    of_worlds = [ranks(world_size).run(train_dyadic, case, 4)[0]["tables"] for world_size in (1, 2, 4)]
    for fewer, more in itertools.pairwise(of_worlds):
        for name in ("a", "b"):
            assert_equal(fewer[name], more[name])


def assert_equal(table: Any, reference: Any) -> None:
    assert torch.equal(table.weight, reference.weight)
    assert table.index.keys() == reference.index.keys()
    for key, value in table.index.items():
        assert torch.equal(value, reference.index[key]), key


@pytest.mark.parametrize("kind", ["data_parallel", "table_wise", "row_wise"])
def test_three_ranks_equal_the_unsharded_model(kind: str) -> None:
    on = (2,) if kind == "table_wise" else ()
    tables = (
        Table("a", 11, 8, ("f0",), "SUM", (kind, *on)),
        Table("b", 2, 8, ("f1", "f0"), "MEAN", (kind, *on)),  # fewer rows than ranks
    )
    case = Case(tables, sizes=(3, 1, 2))
    check(case, 3, ranks(3).run(train_sharded, case))
