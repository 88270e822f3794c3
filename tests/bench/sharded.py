"""``sharded``: a training step on 1 and 2 processes, against TorchRec's DistributedModelParallel on the same plan.

Static tables and hashed ones (raw 64-bit ids, ``dense_rows=0``; every id already has its row) are compared with
TorchRec's static ones. This is gloo on one host: ranks share the cores, so with two ranks each has one thread.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.collections.pooled import HashEmbeddingBagCollection
from recfx.kernels.index.mix64 import mix64
from tests.bench.harness import Contestant, Result, compare, take_turns
from tests.bench.setup import Ids, Setup
from tests.bench.workload import OPTIMIZERS, attach, check_close, standard_collection
from tests.support.forkserver import forkserver

STATIC, HASHED, TORCHREC = "recfx, static", "recfx, hashed", "TorchRec DMP, static"
OPTIMIZER = OPTIMIZERS[2]
TAKEN = 0.75
"""Share of the rows that have an id; more, and a bucket might be full."""
PLANS = {
    "table_wise": ("table_wise",),
    "row_wise": ("row_wise",),
    "data_parallel": ("data_parallel",),
    "mixed": ("table_wise", "row_wise", "column_wise"),
}
WORLDS = (1, 2)


class Sharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, made to cut rows on a CPU, too."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All types that the plans name."""
        return ["table_wise", "row_wise", "column_wise", "data_parallel"]


def run(setup: Setup) -> Iterator[Result]:
    """One step, forward and backward with the fused row-wise Adagrad, from this rank's KJT."""
    forkserver()
    for world_size in WORLDS:
        for plan in PLANS:  # each in its own processes: torch never frees tables that have an optimizer in backward
            with tempfile.TemporaryDirectory() as folder:
                arguments = (world_size, folder, asdict(setup), plan)
                mp.start_processes(_rank, arguments, nprocs=world_size, start_method="forkserver")
                yield from torch.load(os.path.join(folder, "results"), weights_only=False)


def _rank(rank: int, world_size: int, folder: str, sizes: dict[str, Any], plan: str) -> None:
    setup = Setup(**sizes)
    logging.disable(logging.WARNING)
    torch.set_num_threads(max(1, setup.threads // world_size))
    store = os.path.join(folder, "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    results = _measure(rank, world_size, setup, plan)
    gc.collect()  # wrappers that outlive their process group may abort the process
    if rank == 0:
        torch.save(results, os.path.join(folder, "results"))
    dist.barrier()
    dist.destroy_process_group()


def _measure(rank: int, world_size: int, setup: Setup, plan: str) -> list[Result]:
    universe = int(setup.rows * TAKEN)
    torch.manual_seed(rank)
    dense, raw = Ids(setup, "uniform", universe), Ids(setup, "uniform", universe, raw=mix64)
    gradient = torch.rand(setup.batch, setup.tables * setup.dim)
    contestants, models = [], {}
    for name, ids in ((TORCHREC, dense), (STATIC, dense), (HASHED, raw)):
        model = models[name] = model_of(name, setup, plan, world_size, universe)
        contestants.append(_contestant(name, model, ids.batches(), gradient))
    ours, theirs = (models[name](dense.batches()[-1]).to_dict() for name in (STATIC, TORCHREC))
    for key, pooled in ours.items():  # TorchRec's columns are in the order of ranks
        check_close(f"{plan}, {key}", theirs[key], pooled)
    for contestant in contestants:
        contestant.run(-1)
    times = take_turns(contestants, setup.iterations, setup.warm_up)
    facts = {**setup.facts("uniform"), "processes": world_size, "optimizer": OPTIMIZER.name, "plan": plan}
    facts["threads"] = torch.get_num_threads()
    case = f"sharded/{plan}/{world_size}"
    return [compare(case, times, ours, TORCHREC, facts) for ours in (STATIC, HASHED)]


def _contestant(name: str, model: nn.Module, batches: list[KeyedJaggedTensor], gradient: torch.Tensor) -> Contestant:
    def step(iteration: int) -> None:
        model(batches[iteration]).values().backward(gradient)
        dist.barrier()  # a step is over when it is over on all ranks

    return Contestant(name, step)


def model_of(name: str, setup: Setup, plan: str, world_size: int, universe: int) -> nn.Module:
    """The sharded model of a contestant, ``TORCHREC``, ``STATIC`` or ``HASHED``; all ranks call it."""
    torch.manual_seed(0)
    collection: nn.Module = standard_collection(setup)
    attach(collection, OPTIMIZER)
    if name != TORCHREC:
        collection = recfx.convert(
            collection, hashing=None if name == STATIC else recfx.HashConfig(dense_rows=0), verify=False
        )
    if name == HASHED:
        assert isinstance(collection, HashEmbeddingBagCollection)
        for table in collection.tables:
            collection.index(table.name).insert(mix64(torch.arange(universe)))
    sharder = Sharder() if name == TORCHREC else recfx.sharders()[0]
    kinds = PLANS[plan]
    makers = {
        "table_wise": lambda table: sharding_plan.table_wise(rank=table % world_size),
        "row_wise": lambda table: sharding_plan.row_wise(),
        "column_wise": lambda table: sharding_plan.column_wise(ranks=[0, world_size - 1]),
        "data_parallel": lambda table: sharding_plan.data_parallel(),
    }
    names = list(collection.embedding_bags)
    per_table = {table: makers[kinds[number % len(kinds)]](number) for number, table in enumerate(names)}
    module_plan = sharding_plan.construct_module_sharding_plan(
        collection, per_table, sharder=sharder, local_size=world_size, world_size=world_size, device_type="cpu"
    )
    state = {f"0.{key}": value.clone() for key, value in collection.state_dict().items()} if name == TORCHREC else {}
    model = DistributedModelParallel(
        nn.Sequential(collection),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"0": module_plan}),
        sharders=[sharder],
    )
    if name == TORCHREC:  # sharding has made new weights
        model.load_state_dict(state)
    return model
