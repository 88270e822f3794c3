"""What the graphs of sharded collections run on two NPUs: the part of ``coverage.py`` that each rank does."""

import re
from contextlib import nullcontext
from typing import Any

import torch

import recfx
from recfx.ir import format_graph
from tests.ascend.npu_runtime import round_trips
from tests.ascend.npu_runtime.recorder import Recorder, launching_nothing
from tests.ascend.npu_runtime.round_trips import Meeting, Moment
from tests.ascend.npu_runtime.sharded_training import model_on_npus
from tests.sharding.cases import Case, Table, batches

STEPS = 3


def _tables(means: bool) -> tuple[Table, ...]:
    """A table of each sharding type, in one graph."""
    mean = "MEAN" if means else "SUM"
    return (
        Table("a", 11, 8, ("f0",), "SUM", ("row_wise",)),
        Table("b", 13, 16, ("f1", "f0"), mean, ("column_wise", 1, 0)),
        Table("c", 9, 8, ("f2",), "SUM", ("table_wise", 1)),
        Table("d", 7, 8, ("f1",), mean, ("data_parallel",)),
        Table("e", 13, 8, ("f2",), mean, ("row_wise",)),
    )


def _hashed(**settings: object) -> Case:
    config = recfx.HashConfig(dense_rows=0, rows=96, buckets=4, **settings)  # type: ignore[arg-type]
    return Case(_tables(means=True), hashing=config, raw_ids=150, optimizer="adagrad")


CASES = (
    Case(_tables(means=True), optimizer="adagrad"),
    Case(_tables(means=True), optimizer="adam", sizes=(4, 1)),
    Case(_tables(means=True), optimizer="rowwise_adagrad", kernel="fused"),
    Case(_tables(means=True), kernel="dense"),
    Case(_tables(means=False), optimizer="sgd", is_weighted=True),
    Case(_tables(means=True), optimizer="adagrad", hashing=recfx.HashConfig()),
    _hashed(),
    _hashed(on_full="evict"),
    _hashed(on_full="evict", admit_after=2, unseen="share"),
)


def measure(
    rank: int, world_size: int, target: str, case: Case
) -> tuple[set[str], dict[Meeting, set[Moment]], dict[Meeting, str]]:
    """The operators of a case through a target, and where the host or the AI CPU was involved."""
    recorder = Recorder(frozenset(round_trips.fallbacks()))
    with launching_nothing(target) if target != "reference" else nullcontext():
        for ids_on_host in (False, True):
            _run(recorder, target, case, ids_on_host, rank, world_size)
    return recorder.operators, dict(recorder.seen), recorder.lines


def _run(recorder: Recorder, target: str, case: Case, ids_on_host: bool, rank: int, world_size: int) -> None:
    device = torch.device("npu", rank)
    torch.npu.set_device(device)
    collection = model_on_npus(case, world_size, device, ids_on_host).sparse
    collections = "sharded, ids on the host" if ids_on_host else "sharded"
    for step in batches(case, world_size, STEPS):
        features = step[rank].to(device)
        with recorder:
            recorder.now = Moment(target, collections, "training")
            pooled = collection.train()(features).values()
            pooled.backward(torch.ones_like(pooled))
            recorder.now = Moment(target, collections, "eval")
            with torch.no_grad():
                collection.eval()(features).values()
            recorder.now = None
    assert kernels(collection) == {target}


def kernels(collection: Any) -> set[str]:
    """The targets that serve the lookups of a collection."""
    return set(re.findall(r"kernel='?([\w\[\]]+)", format_graph(collection.graph_module)))
