"""Ordinary optimizers in checkpoints of sharded models: alone, and beside fused ones."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import recfx
from recfx.collections.sharding.gather import gather_tables
from tests.sharding.cases import Case, Model, batches, concatenate, model_and_plan, model_parallel, values_of
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.stateful import assert_equal, case_of, in_kinds, make, tables_of, train


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks(2)
def test_in_torchrecs_model_parallel(rank: int, world_size: int, wrapped: bool, kind: str, tmp_path: Path) -> None:
    """TorchRec's flow, with its optimizers."""
    case = in_kinds(case_of("mixed"))[kind]
    folder = str(tmp_path)
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=1, value=0.5), WarmupStage(max_iters=9, value=0.1)]

    def build_one(seed: int) -> tuple[DistributedModelParallel, CombinedOptimizer]:
        parallel = model_parallel(*model_and_plan(replace(case, seed=seed), world_size))
        with torch.no_grad():
            parallel.module.over.weight.add_(seed)
        dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
        ordinary = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.1))
        if not wrapped:
            return parallel, CombinedOptimizer([parallel.fused_optimizer, ordinary])
        clipped = GradientClippingOptimizer(ordinary, GradientClipping.NORM, max_gradient=0.1)
        warming = [WarmupOptimizer(inner, copy.deepcopy(stages)) for inner in (parallel.fused_optimizer, clipped)]
        return parallel, CombinedOptimizer([("fused", warming[0]), ("", warming[1])])

    def steps(parallel: nn.Module, optimizer: CombinedOptimizer, first: int, last: int) -> None:
        for step in batches(case, world_size, last)[first:]:
            optimizer.zero_grad()
            parallel(step[rank])[0].backward()
            optimizer.step()

    model, optimizer = build_one(0)
    steps(model, optimizer, 0, 2)
    recfx.save_checkpoint(model, folder, optimizer=optimizer)
    resumed, again = build_one(3)
    recfx.load_checkpoint(resumed, folder, optimizer=again)
    for _ in range(2):
        rates = [[group["lr"] for group in trained.param_groups] for trained in (optimizer, again)]
        assert rates[0] == rates[1]
        steps(model, optimizer, 2, 4)
        steps(resumed, again, 2, 4)
    inner: Any = [recfx.models.discover.unwrap(model_of) for model_of in (resumed, model)]
    assert_equal(tables_of(inner[0]), tables_of(inner[1]))


def dense(
    rank: int, world_size: int, case: Case, folder: str, source: str, steps: int, named: bool = False
) -> dict[str, torch.Tensor]:
    """Tables without a fused optimizer: an ordinary one steps this rank's shards."""
    model = make(case, world_size)
    tables = model.get_submodule("sparse")
    optimizer = torch.optim.Adam(tables.named_parameters() if named else tables.parameters(), lr=0.1)
    if source:
        recfx.load_checkpoint(model, source, optimizer=optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        assert isinstance(model, Model)
        for step in batches(replace(case, sizes=(1,)), 4, 1):
            share = 4 // max(world_size, 1)
            values = values_of(model.sparse(concatenate(step[rank * share : (rank + 1) * share])))
            (values.square().sum() * max(world_size, 1)).backward()
        optimizer.step()
    recfx.save_checkpoint(model, folder, optimizer=optimizer)
    sparse: Any = model.sparse
    if world_size:
        return {f"{name}.weight": table.weight for name, table in gather_tables(sparse).items()}
    return {f"{spec.name}.weight": sparse.weight(spec.name).detach() for spec in sparse.tables}


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_an_ordinary_optimizer_of_sharded_tables(tmp_path: Path, kind: str) -> None:
    def case(plan: str, world_size: int) -> Case:
        return replace(in_kinds(case_of(plan, None, "adam", world_size))[kind], kernel="dense")

    first = ranks(2).run(dense, case("columns", 2), str(tmp_path / "a"), "", 2)[0]
    kept = dense(0, 0, case("tables", 0), str(tmp_path / "b"), str(tmp_path / "a"), 0)
    assert_equal(kept, first)
    shutil.rmtree(tmp_path / "a")
    onward = dense(0, 0, case("tables", 0), str(tmp_path / "c"), str(tmp_path / "b"), 2)
    sharded = ranks(2).run(dense, case("tables", 2), str(tmp_path / "d"), str(tmp_path / "b"), 2)[0]
    last = [dense(0, 0, case("tables", 0), str(tmp_path / "e"), str(tmp_path / name), 1) for name in "cd"]
    for actual, expected in ((sharded, onward), last):
        for name, value in actual.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_an_ordinary_optimizer_of_named_parameters(tmp_path: Path) -> None:
    """Other ranks have other shards, so that its own names of parameters say nothing under another plan."""

    def case(plan: str) -> Case:
        return replace(case_of(plan, None, "adam"), kernel="dense")

    first = ranks(2).run(dense, case("columns"), str(tmp_path / "a"), "", 1, True)[0]
    for plan in ("mixed", "tables"):
        again = ranks(2).run(dense, case(plan), str(tmp_path / plan), str(tmp_path / "a"), 0, True)[0]
        assert_equal(again, first)


def in_backward(rank: int, world_size: int, case: Case, folder: str, loads: bool) -> dict[str, torch.Tensor]:
    """Fused optimizers in backward; their row sums."""
    model = make(case, world_size)
    if loads:
        recfx.load_checkpoint(model, folder)
    else:
        train(model, case, rank, world_size, 0, 2)
        recfx.save_checkpoint(model, folder)
    return {name: value for name, value in tables_of(model).items() if name.endswith(".sum")}


def ordinary(rank: int, world_size: int, case: Case, folder: str) -> dict[str, torch.Tensor]:
    """An ordinary optimizer instead; the row sums of this rank's tables."""
    model = make(replace(case, kernel="dense"), world_size)
    sparse: Any = model.get_submodule("sparse")
    optimizer = RowWiseAdagrad(sparse.parameters(), eps=1e-2)
    recfx.load_checkpoint(model, folder, optimizer=optimizer)
    names = {id(parameter): name.split(".")[1] for name, parameter in sparse.named_parameters()}
    return {f"{names[id(parameter)]}.optimizer.sum": state["sum"] for parameter, state in optimizer.state.items()}


@pytest.mark.parametrize("plan", ["columns", "rows"])
def test_row_sums_of_any_shards_go_to_an_ordinary_optimizer(tmp_path: Path, plan: str) -> None:
    """Where they were saved in blocks of columns, it is their mean."""
    ranks(2).run(in_backward, case_of(plan, None, "rowwise_adagrad"), str(tmp_path), False)
    uncut = case_of("tables", None, "rowwise_adagrad")
    expected = in_backward(0, 0, uncut, str(tmp_path), True)
    assert_equal(ordinary(0, 0, uncut, str(tmp_path)), expected)
    sharded = ranks(2).run(ordinary, uncut, str(tmp_path))
    assert not sharded[0].keys() & sharded[1].keys()
    assert_equal({**sharded[0], **sharded[1]}, expected)


@on_ranks(2)
def test_an_optimizer_on_some_ranks_alone(rank: int, world_size: int, tmp_path: Path) -> None:
    case = replace(case_of("columns", None, "adam", 2), kernel="dense")
    model = make(case, world_size)
    optimizer = torch.optim.Adam(model.get_submodule("sparse").parameters())
    with pytest.raises(recfx.CheckpointError, match="only 1 of 2 ranks have an ordinary optimizer to save"):
        recfx.save_checkpoint(model, tmp_path, optimizer=optimizer if rank == 1 else None)
    assert not list(tmp_path.iterdir())
    dist.barrier()
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    with pytest.raises(recfx.CheckpointError, match="optimizer= or in_backward= is not the same on all ranks"):
        recfx.load_checkpoint(model, tmp_path, optimizer=optimizer if rank == 0 else None)
