"""What becomes of a sharded collection that is copied, and what it takes over from the unsharded one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingPlan

import recfx
from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from tests.sharding.cases import (
    Case,
    Table,
    batches,
    build,
    model_and_plan,
    model_parallel,
    shard_converted,
    with_optimizer,
)
from tests.sharding.ranks import ranks
from tests.support.fake_group import fake_group

CASE = Case(
    (
        Table("a", 32, 8, ("f0",), "SUM", ("table_wise", 0)),
        Table("b", 32, 8, ("f1",), "MEAN", ("column_wise", 0, 0)),
        Table("c", 32, 8, ("f2",), "SUM", ("row_wise",)),
    ),
    optimizer="adagrad",
    hashing=recfx.HashConfig(dense_rows=0, buckets=4),
)


def sharded(training: bool = True) -> ShardedHashEmbeddingBagCollection:
    converted = with_optimizer(CASE, recfx.convert(build(CASE)[0], hashing=CASE.hashing)).train(training)
    module: ShardedHashEmbeddingBagCollection = shard_converted(CASE, converted, 2)
    return module


def test_a_copy_has_its_own_tables_the_same_groups_and_what_else_was_shared() -> None:
    with fake_group(0, 2):
        module: Any = sharded()
        weight = module.store.weight("b@1")
        module.notes = [module]
        together = copy.deepcopy({"weight": weight, "module": module, "again": weight})
        duplicate = together["module"]
        assert duplicate is not module
        assert duplicate.notes == [duplicate]
        assert duplicate.store.weight("b@1") is together["weight"] is together["again"]
        assert duplicate.store.weight("b@1") is dict(duplicate.named_parameters())["embedding_bags.b@1.weight"]
        assert torch.equal(together["weight"], weight)
        assert together["weight"].data_ptr() != weight.data_ptr()
        assert all(vars(duplicate.groups)[name] is group for name, group in vars(module.groups).items())
        assert duplicate.index("a") is not module.index("a")


PICKLED: dict[str, Callable[[nn.Module, ShardingPlan, KeyedJaggedTensor], nn.Module]] = {
    "convert": lambda model, plan, _: recfx.convert(model, plan=plan),
    "model parallel": lambda model, plan, _: model_parallel(recfx.convert(model), plan),
    "data parallel": lambda model, plan, _: nn.parallel.DistributedDataParallel(recfx.convert(model, plan=plan)),
    "whole graph": lambda model, plan, batch: recfx.convert(model, (batch,), plan=plan, whole_graph=True),
    "trace": lambda model, plan, batch: recfx.trace(recfx.convert(model, plan=plan), (batch,)),
}


def pickled(rank: int, world_size: int, form: str) -> list[tuple[str, str, str]]:
    case = Case((Table("b", 32, 8, ("f0",), "SUM", ("row_wise",)),))
    (batch,) = (step[rank] for step in batches(case, world_size, 1))
    model = PICKLED[form](*model_and_plan(case, world_size, is_converted=False), batch)
    told = []
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(recfx.errors.CheckpointError) as caught:
            save(model)
        told.append((caught.value.reason, caught.value.module_path, caught.value.what_to_do))
    for one, other in zip(model(batch), copy.deepcopy(model)(batch), strict=True):
        assert torch.equal(one, other)
    return told


@pytest.mark.parametrize("form", PICKLED)
def test_a_sharded_model_that_is_pickled_names_what_saves_it(form: str) -> None:
    for told in ranks(2).run(pickled, form):
        for reason, path, advice in told:
            assert (reason, path.rpartition(".")[2]) == ("sharded_not_pickled", "sparse")
            assert all(way in advice for way in ("save_checkpoint", "state_dict", "unconvert", "export", "deepcopy"))
