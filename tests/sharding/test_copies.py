"""Copies of sharded models, and models that are sharded no longer."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.types import ShardingPlan

import recfx
from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from recfx.errors import CheckpointError, ConversionError, ExportError, RecfxError
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
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.stateful import ADMIT, LRU, case_of, in_kinds, make, sharded_of, train
from tests.support.fake_group import fake_group
from tests.support.refusals import refused

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
    return shard_converted(CASE, converted, 2)


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


@pytest.mark.parametrize("form", PICKLED)
@on_ranks(2)
def test_a_sharded_model_that_is_pickled_names_what_saves_it(rank: int, world_size: int, form: str) -> None:
    case = Case((Table("b", 32, 8, ("f0",), "SUM", ("row_wise",)),))
    (batch,) = (step[rank] for step in batches(case, world_size, 1))
    model = PICKLED[form](*model_and_plan(case, world_size, is_converted=False), batch)
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with refused("sharded_not_pickled", error=CheckpointError) as caught:
            save(model)
        assert caught.value.module_path.rpartition(".")[2] == "sparse"
        advised = ("save_checkpoint", "state_dict", "unconvert", "export", "deepcopy")
        assert all(way in caught.value.what_to_do for way in advised)
    for one, other in zip(model(batch), copy.deepcopy(model)(batch), strict=True):
        assert torch.equal(one, other)


KEYS = {"adagrad": ("sum",), "rowwise_adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq", "step")}


def described(plain: Any, mapping: Any) -> dict[str, Any]:
    sparse = plain.sparse
    assert type(sparse) in (EmbeddingBagCollection, EmbeddingCollection)
    state = {}
    for name, parameter in sparse.named_parameters():
        (optimizer,) = parameter._in_backward_optimizers
        values = optimizer.state[parameter]
        state[name] = {key: values[key].clone() for key in values if isinstance(values[key], torch.Tensor)}
    return {"weights": plain.state_dict(), "optimizer": state, "mapping": mapping}


def back(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    model = make(case, world_size)
    train(model, case, rank, world_size, 0, 3)
    before = model.state_dict().keys()
    plain, mapping = recfx.unconvert(model, with_mapping=True)
    assert model.state_dict().keys() == before
    return described(plain, mapping)


@pytest.mark.parametrize(
    ("plan", "hashing", "optimizer"),
    [("mixed", LRU, "adagrad"), ("columns", ADMIT, "adam"), ("rows", None, "rowwise_adagrad")],
)
@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_equals_the_unsharded_model_unconverted(plan: str, hashing: Any, optimizer: str, kind: str) -> None:
    case = in_kinds(case_of(plan, hashing, optimizer))[kind]
    whole = make(case, 0)
    train(whole, case, 0, 0, 0, 3)
    expected = described(*recfx.unconvert(whole, with_mapping=True))  # type: ignore[misc]
    for answer in ranks(2).run(back, case):
        assert answer["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(answer["weights"][name], weight, rtol=1e-4, atol=1e-5)
        for name, state in expected["optimizer"].items():
            for key in KEYS[optimizer]:
                torch.testing.assert_close(answer["optimizer"][name][key], state[key], rtol=1e-4, atol=1e-5)
        assert answer["mapping"].keys() == expected["mapping"].keys()
        for table, (ids, rows) in expected["mapping"].items():
            assert torch.equal(answer["mapping"][table][0], ids)
            assert torch.equal(answer["mapping"][table][1], rows)


@on_ranks(2)
def test_ids_in_an_index_are_refused_on_all_ranks(rank: int, world_size: int) -> None:
    case = case_of("tables")
    model = make(case, world_size)
    train(model, case, rank, world_size, 0, 1)
    with refused("index_holds_ids"):
        recfx.unconvert(model)


@on_ranks(2)
def test_a_torn_index_on_one_rank_is_an_error_on_all(rank: int, world_size: int) -> None:
    case = case_of("rows")
    model = make(case, world_size)
    train(model, case, rank, world_size, 0, 1)
    if rank == 1:
        next(iter(sharded_of(model).hash_indexes.values())).row_state.fill_(7)  # type: ignore[operator, union-attr]
    with refused("torn_state", error=CheckpointError):
        recfx.unconvert(model, with_mapping=True)


def test_ranks_whose_process_group_was_destroyed(tmp_path: Path) -> None:
    """Each of them would take itself for alone."""
    with fake_group(0, 2):
        model = make(case_of("rows"), 2)
    calls: list[tuple[type[RecfxError], Callable[[], object]]] = [
        (ConversionError, lambda: recfx.unconvert(model, with_mapping=True)),
        (CheckpointError, lambda: recfx.save_checkpoint(model, tmp_path / "run")),
        (CheckpointError, lambda: recfx.load_checkpoint(model, tmp_path / "run")),
        (ExportError, lambda: recfx.export(model, tmp_path / "model.pt", None)),
    ]
    for error, call in calls:
        with pytest.raises(error, match=r"^\[no_process_group\] .*before torch.distributed.destroy_process_group"):
            call()
    assert not any(tmp_path.iterdir())
