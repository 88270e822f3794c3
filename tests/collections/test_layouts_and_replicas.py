"""Layouts of tables, replicas of modules, and states in torch.distributed.checkpoint."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import recfx
from recfx.checkpoint.directory import Manifest
from tests.builders.batches import one_bag
from tests.builders.collections import one_table
from tests.checkpoint.training import Training, assert_same, batch
from tests.support.forkserver import forkserver
from tests.support.layouts import LAYOUTS, batch_of_two, contiguous, laid_out, standard, trained
from tests.support.ports import free_port
from tests.support.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KINDS = ["pooled", "weighted", "sequence"]


@pytest.mark.parametrize("hashing", [recfx.HashConfig(), recfx.HashConfig.raw_ids()], ids=["adopted", "raw"])
@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_trains_as_a_contiguous_one(kind: str, optimizer: Any, hashing: recfx.HashConfig) -> None:
    def converted() -> Any:
        collection = recfx.convert(standard(kind), hashing=hashing)
        if optimizer is not None:
            _apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": 0.5})
        return collection

    features = batch_of_two()
    for name, layout in LAYOUTS.items():
        for part in ("values", "lengths", "weights"):
            expected = laid_out(features, part, lambda tensor, layout=layout: contiguous(layout(tensor)))
            given = trained(converted(), laid_out(features, part, layout), layout)
            reference = trained(converted(), expected, lambda tensor, layout=layout: contiguous(layout(tensor)))
            for actual, of_contiguous in zip(given, reference, strict=True):
                assert torch.equal(actual, of_contiguous), (name, part)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_any_layout_are_those_of_the_standard_collection(kind: str, layout: Any) -> None:
    plain = standard(kind)
    converted = recfx.convert(copy.deepcopy(plain))
    features = batch_of_two()
    for actual, expected in zip(trained(converted, features, layout), trained(plain, features, layout), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)


def replica(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        check_replica(rank)
        gc.collect()  # wrappers that outlive their process group may abort the process
        dist.barrier()  # nor may the rank that keeps the store leave first
        Path(folder, str(rank)).write_text("done")
    finally:
        dist.destroy_process_group()


def check_replica(rank: int) -> None:
    torch.manual_seed(0)
    plain = one_table()
    batch = one_bag(1, 2 + rank)
    adopted = DistributedDataParallel(recfx.convert(plain))
    adopted(batch).values().sum().backward()
    gradient = plain.embedding_bags["t"].weight.grad
    assert gradient[:4, 0].tolist() == [0.0, 1.0, 0.5, 0.5]  # the mean over ranks

    hashed = recfx.convert(plain, hashing=recfx.HashConfig(dense_rows=0))
    replicas = DistributedDataParallel(hashed)
    with refused("unsharded_hash_table", match="replicas would diverge"):
        replicas(batch)
    assert len(hashed.index("t")) == 0
    hashed.eval()
    assert bool((hashed(batch).values() == 0).all())  # reading is no harm


def test_indexed_tables_refuse_to_train_as_replicas(tmp_path: Path) -> None:
    forkserver()
    mp.start_processes(replica, args=(free_port(), str(tmp_path)), nprocs=2, start_method="forkserver")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def save(state: dict[str, Any], directory: Path) -> None:
    dcp.save(state, checkpoint_id=directory, no_dist=True)


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "aside"])
def test_round_trip(tmp_path: Path, in_place: bool) -> None:
    source, target = Training.build(), Training.build(seed=9)
    source.steps(0, 3)
    target.steps(5, 6)
    save(source.model.state_dict(), tmp_path)
    state = target.model.state_dict()
    if not in_place:
        state = {name: torch.empty_like(value) for name, value in state.items()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    target.model.load_state_dict(state)
    assert_same(dict(target.model.state_dict()), dict(source.model.state_dict()))
    for training in (source, target):
        training.model.eval()
    assert torch.equal(source.model(batch(1)), target.model(batch(1)))
    ids = torch.arange(10**12, 10**12 + 30)
    indexes = [training.model.second.index("c") for training in (source, target)]
    assert torch.equal(indexes[0].find(ids), indexes[1].find(ids))
    assert torch.equal(indexes[0].find_or_insert(ids), indexes[1].find_or_insert(ids))


def test_the_data_folder_of_a_checkpoint_is_one_of_dcp(tmp_path: Path) -> None:
    training = Training.build()
    training.steps(0, 2)
    training.save(tmp_path)
    state_of_model = training.model.state_dict()
    state = {f"model.{name}": torch.empty_like(value) for name, value in state_of_model.items()}
    dcp.load(state, checkpoint_id=tmp_path / Manifest.read(tmp_path).data, no_dist=True)
    assert_same(state, {f"model.{name}": value for name, value in state_of_model.items()})
