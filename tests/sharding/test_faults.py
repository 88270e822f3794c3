"""Ranks that fail: the others fail too, in bounded time, and nothing wrong is learnt. Short-lived gloo processes."""

import gc
import os
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm_ops import Request
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import recfx
from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from tests.sharding.cases import FORMS, Case, Model, Table, batches, build, shard, sharded_model, values_of
from tests.sharding.pipelined import CPU, PIPELINES, batches_of_rank, dense_optimizer
from tests.sharding.pipelined import sharded_model as two_collections
from tests.sharding.ranks import on_ranks
from tests.support.forkserver import forkserver

TIMEOUT = 4.0  # of the groups, in seconds
SLACK = 10.0  # for a busy machine
CASE = Case(
    (Table("rows", 40, 8, ("f0",), "SUM", ("row_wise",)), Table("whole", 40, 8, ("f1",), "MEAN", ("table_wise", 0))),
    hashing=recfx.HashConfig(dense_rows=0, buckets=2),
    raw_ids=12,
    optimizer="adagrad",
)


def local_tensors(model: Model) -> dict[str, Any]:
    """This rank's weights, ids and optimizer state, by shard."""
    sparse = model.sparse
    assert isinstance(sparse, ShardedHashEmbeddingBagCollection)
    return {
        name: {
            "weight": sparse.store.weight(name).detach().clone(),
            "index": {key: value.clone() for key, value in index.state_dict().items()},
            "optimizer": {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in sparse.store.optimizers[name].state.items()
            },
        }
        for name, index in sparse.hash_indexes.items()
    }


def step(model: Model, batch: KeyedJaggedTensor) -> float:
    loss, _ = model(batch)
    loss.backward()
    return float(loss.detach())


# Running


def run(folder: Path, function: Callable[[int, Path], Any], expected_exits: tuple[int, ...] = (0, 0)) -> list[Any]:
    """``function(rank, folder)`` in new processes; what each gives back, None where one ended before."""
    folder.mkdir()
    context = forkserver()
    every = range(len(expected_exits))
    processes = [context.Process(target=serve, args=(rank, len(every), folder, function)) for rank in every]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60 + TIMEOUT + SLACK)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    assert not alive
    assert tuple(process.exitcode for process in processes) == expected_exits
    answers = [folder / f"answer{rank}" for rank in every]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in answers]


def serve(rank: int, world_size: int, folder: Path, function: Callable[[int, Path], Any]) -> None:
    torch.set_num_threads(1)
    (folder / f"ready{rank}").touch()
    began = time.monotonic()
    while len(list(folder.glob("ready*"))) < world_size and time.monotonic() - began < 60:  # starting may take longer
        time.sleep(0.02)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    try:
        answer = function(rank, folder)
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    torch.save(answer, folder / f"writing{rank}")
    (folder / f"writing{rank}").rename(folder / f"answer{rank}")
    os._exit(0)  # a broken group does not come down in order


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: tmp_path / name


# A rank that dies


def _forward(model: Model, batch: KeyedJaggedTensor, ends: Callable[[], None]) -> None:
    ends()
    model(batch)


def _backward(model: Model, batch: KeyedJaggedTensor, ends: Callable[[], None]) -> None:
    loss, _ = model(batch)
    ends()
    loss.backward()


def _save(model: Model, batch: KeyedJaggedTensor, ends: Callable[[], None]) -> None:
    ends()
    recfx.save_checkpoint(model, tempfile.mkdtemp())


def _pipeline(model: Model, batch: KeyedJaggedTensor, ends: Callable[[], None]) -> None:
    model.over.register_forward_hook(lambda *_: ends())
    progress(recfx.TrainPipeline, model, [(batch, int)] * 4)


def _torchrecs_pipeline(model: Model, batch: KeyedJaggedTensor, ends: Callable[[], None]) -> None:
    """In eval mode, when the ids of the next batch are on their way."""
    progress(TrainPipelineSparseDist, model.eval(), [(batch, int)] * 4 + [(batch, ends)])


def progress(kind: Callable[..., Any], model: Model, data: list[tuple[KeyedJaggedTensor, Callable[[], Any]]]) -> None:
    """Run a pipeline; data loading calls a function before each batch."""
    pipeline = kind(model, torch.optim.SGD(model.over.parameters(), lr=0.1), torch.device("cpu"))
    source = (batch for batch, before in data if before() is not data)
    for _ in data:
        pipeline.progress(source)


def lose_a_rank(rank: int, folder: Path) -> list[tuple[str, str, float]]:
    """What the rank that is left raises, at each place where the other one ends."""
    function = {loss.__name__: loss for loss in LOSSES}[folder.name]
    model = sharded_model(CASE, 2)
    batch = batches(CASE, 2, 1)[0][rank]
    step(model, batch)
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(recfx.OutOfStepError) as caught:
        function(model, batch, lambda: os._exit(7) if rank == 1 else None)
    with pytest.raises(recfx.OutOfStepError):
        type(model.sparse).forward(model.sparse, batch)  # a pipeline of TorchRec's has put another in its place
    if function is _backward:
        assert caught.value.module_path == "sparse"
        assert "in the backward of" in caught.value.message
    assert "another rank has ended" in caught.value.message
    return [(caught.value.reason, caught.value.what_to_do, time.monotonic() - began)]


LOSSES = (_forward, _backward, _save, _pipeline, _torchrecs_pipeline)


@pytest.mark.parametrize("where", LOSSES, ids=lambda loss: loss.__name__.strip("_"))
def test_a_lost_rank_is_one_error_of_ours(where: Callable[..., None], folders: Callable[[str], Path]) -> None:
    ((reason, what_to_do, seconds),), _ = run(folders(where.__name__), lose_a_rank, expected_exits=(0, 7))
    assert reason == "rank_lost"
    assert "checkpoint" in what_to_do
    assert seconds < TIMEOUT + SLACK


# A rank whose data end early


def save_early(rank: int, folder: Path) -> str:
    model = two_collections(CASE, 2, "two").eval()
    driver = PIPELINES[folder.name](model, dense_optimizer(CASE, model), CPU)
    source = iter(batches_of_rank(CASE, rank, 2, 2 + rank, "two"))
    try:
        for _ in range(2 + rank):
            driver.progress(source)
        recfx.save_checkpoint(model, folder / "saved")
    except recfx.OutOfStepError as error:
        return error.reason
    return ""


@pytest.mark.parametrize("pipeline", ["loop", "sparse_dist"])
def test_a_rank_that_saves_because_its_data_ended_early(pipeline: str, folders: Callable[[str], Path]) -> None:
    assert run(folders(pipeline), save_early) == ["ranks_at_different_calls"] * 2


# A loss that leaves a collection out on some ranks


def leave_out(rank: int, folder: Path) -> tuple[str, str, bool, bool]:
    """Where this rank fails, the reason, and whether it names backward and cure, if only rank 0's loss uses both."""
    sharding, form, left_out = folder.name.split("-")
    case = FORMS[form](Case((Table("a", 12, 8, ("f0",), sharding=(sharding,)),)))
    collections = [shard(case, build(case)[0], dist.get_world_size()) for _ in range(2)]
    batch, where = KeyedJaggedTensor(["f0"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1])), ""
    try:
        for step in range(3):
            where = "forward"
            sums = [values_of(collection(batch)).sum() for collection in collections]
            if rank and step == 1:
                del sums[int(left_out)]
            where = "backward"
            torch.stack(sums).sum().backward()
    except recfx.OutOfStepError as error:
        said = "in the backward of the collection" in error.message, "0 * output.sum()" in error.what_to_do
        return where, error.reason, *said
    return "", "", False, False


@pytest.mark.parametrize(
    ("sharding", "form", "left_out", "world_size"),
    [("row_wise", "pooled", 0, 3), ("data_parallel", "rows", 1, 2), ("row_wise", "rows", 0, 2)],
)
def test_ranks_that_wait_in_the_backward_of_a_collection_name_it(
    sharding: str, form: str, left_out: int, world_size: int, folders: Callable[[str], Path]
) -> None:
    """This takes seconds, because the groups' timeout has to expire. The others wait for rank 0 in their next call."""
    told = run(folders(f"{sharding}-{form}-{left_out}"), leave_out, (0,) * world_size)
    assert told == [("backward", "rank_lost", True, True), *[("forward", "rank_lost", False, True)] * (world_size - 1)]


@pytest.mark.parametrize("form", ["pooled", "rows"])
@on_ranks(2)
def test_forwards_without_a_backward_leave_nothing(rank: int, world_size: int, form: str) -> None:
    """How many of TorchRec's requests are left."""
    case = FORMS[form](Case((Table("a", 12, 8, ("f0",), sharding=("row_wise",)),)))
    collection = shard(case, build(case)[0], world_size)
    batch = KeyedJaggedTensor(["f0"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    before = weakref.WeakSet(thing for thing in gc.get_objects() if isinstance(thing, Request))
    for _ in range(3):
        values_of(collection(batch))
    gc.collect()
    assert sum(isinstance(thing, Request) and thing not in before for thing in gc.get_objects()) == 0


# A table that runs full on one rank


def fill_a_table(rank: int, folder: Path) -> dict[str, Any]:
    case = CASE
    model = sharded_model(case, 2)
    data = [step[rank] for step in batches(case, 2, 2)]
    step(model, data[0])
    too_many = torch.arange(200) * 2**33 + 3
    many = KeyedJaggedTensor(["f0", "f1"], too_many, lengths=torch.tensor([0] * 2 + [100] * 2))
    before = local_tensors(model)
    began = time.monotonic()
    errors: list[BaseException] = []
    for batch in (many, data[1]):  # the failing rank's caller carries on
        try:
            step(model, batch)
        except Exception as error:
            errors.append(error)
            if rank == 1:
                break
    answer = {
        "errors": [(type(error).__name__, getattr(error, "reason", ""), str(error)) for error in errors],
        "seconds": time.monotonic() - began,
        "before": before,
        "after": local_tensors(model),
    }
    if rank == 0:  # alive until the other one has failed
        deadline = time.monotonic() + TIMEOUT + SLACK
        while not (folder / "answer1").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    return answer


def test_a_table_that_is_full_on_one_rank(folders: Callable[[str], Path]) -> None:
    full, peer = run(folders("full"), fill_a_table)
    (first, first_reason, message), (then, then_reason, advice) = full["errors"]
    assert (first, first_reason) == ("TableFullError", "table_full")
    assert "sparse: bucket" in message
    assert "'whole'" in message
    assert (then, then_reason) == ("OutOfStepError", "out_of_step")
    assert "TableFullError" in advice
    torch.testing.assert_close(full["after"], full["before"], rtol=0, atol=0)
    assert full["seconds"] < SLACK
    assert len(peer["errors"]) == 1
    assert peer["seconds"] < TIMEOUT + SLACK
    weights = [{name: shard["weight"] for name, shard in peer[when].items()} for when in ("after", "before")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
