"""``pipeline``: steps of a sharded model on two processes, ``recfx.TrainPipeline`` against steps one by one.

A quarter of the tables is table-wise on each rank, the other half is row-wise, and there is an MLP on top. Each process
has one thread. On one host there is little to gain: ids arrive at once, and all processors are busy. A second form
imitates a cluster: the dense part computes elsewhere, on an accelerator (the host sleeps meanwhile, a third of the time
in the forward, the rest in the backward), and ids take a while to arrive, for all contestants alike. Contestants train
their own models, which must stay equal bit for bit. A step of a pipeline ends when the next batch's ids have arrived,
so that no contestant works during another's turn.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import sharding_plan as stock
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.sharding.shard import shard_collection
from recfx.kernels.index.mix64 import mix64
from recfx.planner.sharder import HashEmbeddingBagCollectionSharder
from tests.bench.harness import Contestant, Result, Times, compare, take_turns
from tests.bench.setup import Ids, Setup
from tests.bench.workload import LEARNING_RATE, OPTIMIZERS, standard_collection, with_optimizer
from tests.sharding.pipelined import Batch, Loop
from tests.sharding.ranks import ranks

OURS, ONE_BY_ONE, STOCK = "recfx.TrainPipeline", "steps one by one", "TrainPipelineSparseDist"
RANKS = 2
MOST_ITERATIONS, MOST_ROWS, MOST_COLUMNS = 20, 50_000, 32  # three models on each of two processes
DENSE, HIDDEN = 13, 512
IMITATED_MS = (0, 0), (150, 60)
"""How long the host sleeps per step, and how long ids take to arrive."""
TAKEN = 0.75
"""Number of distinct ids that are drawn, as a share of a hashed table's rows."""


class Elsewhere(nn.Module):
    """Takes time without using the processor."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds / 3)
            values.register_hook(lambda _: time.sleep(self.seconds * 2 / 3))
        return values


class Model(nn.Module):
    """A collection, an MLP, a loss; ``elsewhere_ms``: see the module."""

    def __init__(self, sparse: nn.Module, width: int, elsewhere_ms: int) -> None:
        super().__init__()
        self.sparse = sparse
        layers = [nn.Linear(width + DENSE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN // 2), nn.ReLU()]
        self.over = nn.parallel.DistributedDataParallel(
            nn.Sequential(*layers, Elsewhere(elsewhere_ms / 1e3), nn.Linear(HIDDEN // 2, 1))
        )

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.sparse(batch.features).values()
        dense, labels = batch.dense[:, :DENSE], batch.dense[:, DENSE]
        logits = self.over(torch.cat([dense, pooled], 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels), logits.detach()


def run(setup: Setup) -> Iterator[Result]:
    """Static tables, and tables of raw ids in their steady state."""
    setup = replace(
        setup,
        rows=min(setup.rows, MOST_ROWS),
        dim=min(setup.dim, MOST_COLUMNS),
        iterations=min(setup.iterations, MOST_ITERATIONS),
        threads=1,
    )
    for kind in ("static", "hashed"):
        for elsewhere_ms, travel_ms in IMITATED_MS:
            times: Times = ranks(RANKS).run(_on_rank, setup, kind == "hashed", elsewhere_ms, travel_ms)[0]
            facts = {
                **setup.facts("power law"),
                "ranks": RANKS,
                "hidden": HIDDEN,
                "elsewhere_ms": elsewhere_ms,
                "travel_ms": travel_ms,
            }
            name = f"pipeline/{kind}" + ("_imitated_cluster" if elsewhere_ms else "")
            yield compare(name, times, OURS, ONE_BY_ONE, facts)
            yield compare(name, times, OURS, STOCK, facts)


def _on_rank(rank: int, world_size: int, setup: Setup, hashed: bool, elsewhere_ms: int, travel_ms: int) -> Times:
    kinds = {OURS: recfx.TrainPipeline, ONE_BY_ONE: Loop, STOCK: TrainPipelineSparseDist}
    drivers, models = {}, {}
    for name, kind in kinds.items():
        torch.manual_seed(0)
        models[name] = _model(setup, world_size, hashed, elsewhere_ms)
        dense = torch.optim.SGD(models[name].over.parameters(), lr=LEARNING_RATE)
        drivers[name] = kind(models[name], dense, torch.device("cpu"))
    sources = {name: iter(_batches(setup, rank, hashed)) for name in kinds}
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in kinds}

    def contestant(name: str) -> Contestant:
        return Contestant(name, lambda _: outputs[name].append(drivers[name].progress(sources[name])))

    gc.collect()  # graphs are full of cycles
    with _slow_network(travel_ms / 1e3):
        times = take_turns([contestant(name) for name in kinds], setup.iterations, setup.warm_up)
    for name, tensors in outputs.items():
        if not all(torch.equal(mine, other) for mine, other in zip(tensors, outputs[ONE_BY_ONE], strict=True)):
            raise AssertionError(f"{name} gives other numbers than {ONE_BY_ONE}")
    return times


@contextmanager
def _slow_network(seconds: float) -> Iterator[None]:
    """Make ids arrive no sooner than this long after they were sent."""
    start, wait = KJTAllToAllTensorsAwaitable.__init__, KJTAllToAllTensorsAwaitable._wait_impl

    def slow_start(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.arrives_at = time.monotonic() + seconds

    def slow_wait(self: Any) -> KeyedJaggedTensor:
        time.sleep(max(0.0, self.arrives_at - time.monotonic()))
        return wait(self)

    with patch.multiple(KJTAllToAllTensorsAwaitable, __init__=slow_start, _wait_impl=slow_wait):
        yield


def _model(setup: Setup, world_size: int, hashed: bool, elsewhere_ms: int) -> Model:
    collection = with_optimizer(standard_collection(setup), OPTIMIZERS[2])
    hashing = recfx.HashConfig(dense_rows=0) if hashed else None
    converted = recfx.convert(collection, hashing=hashing, verify=False)
    assert isinstance(converted, recfx.HashEmbeddingBagCollection)
    for index in converted.hash_indexes.values() if hashed else ():
        index.find_or_insert(mix64(torch.arange(int(setup.rows * TAKEN))))
    names = [table.name for table in converted.tables]
    half = len(names) // 2
    plan = stock.construct_module_sharding_plan(
        converted,
        {name: stock.table_wise(rank=n % world_size) if n < half else stock.row_wise() for n, name in enumerate(names)},
        sharder=HashEmbeddingBagCollectionSharder(),
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    sharded: Any = shard_collection(converted, dict(plan), ShardingEnv.from_process_group(dist.group.WORLD))
    return Model(sharded, setup.tables * setup.dim, elsewhere_ms)


def _batches(setup: Setup, rank: int, hashed: bool) -> list[Batch]:
    universe = int(setup.rows * TAKEN)
    generator = torch.Generator().manual_seed(rank)
    batches = []
    ids = Ids(setup, "power law", universe, raw=lambda dense: _of_rank(dense, rank, universe, hashed))
    for features in ids.batches():
        dense = torch.rand(setup.batch, DENSE, generator=generator)
        labels = torch.randint(0, 2, (setup.batch, 1), generator=generator)
        batches.append(Batch(features, torch.cat([dense, labels], 1)))
    return batches


def _of_rank(dense: torch.Tensor, rank: int, universe: int, hashed: bool) -> torch.Tensor:
    """No two ranks have the same batch."""
    shifted = (dense + 17 * rank) % universe
    return mix64(shifted) if hashed else shifted
