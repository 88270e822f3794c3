"""``sharded``: a training step on 1 and 2 processes, against TorchRec's DistributedModelParallel on the same plan.

Static tables and hashed ones (raw 64-bit ids, ``dense_rows=0``; every id already has its row) are compared with
TorchRec's static ones. This is gloo on one host: ranks share the cores, so with two ranks each has one thread.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.kernels.index.mix64 import mix64
from tests.bench.harness import Contestant, Result, compare_all
from tests.bench.own_process import cases_on_ranks
from tests.bench.setup import Ids, Setup
from tests.bench.workload import OPTIMIZERS, attach, check_close, standard_collection

STATIC, HASHED, TORCHREC = "recfx, static", "recfx, hashed", "TorchRec DMP, static"
PAIRS = [(STATIC, TORCHREC), (HASHED, TORCHREC)]
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
        return ["table_wise", "row_wise", "column_wise", "data_parallel"]


def run(setup: Setup) -> Iterator[Result]:
    """One step, forward and backward with the fused row-wise Adagrad, from this rank's KJT."""
    for world_size in WORLDS:
        yield from cases_on_ranks(world_size, _measure, setup, PLANS)


def _measure(setup: Setup, plan: str) -> list[Result]:
    world_size = dist.get_world_size()
    universe = int(setup.rows * TAKEN)
    dense, raw = Ids(setup, "uniform", universe), Ids(setup, "uniform", universe, raw=mix64)
    gradient = torch.rand(setup.batch, setup.tables * setup.dim)
    contestants, models = [], {}
    for name, ids in ((TORCHREC, dense), (STATIC, dense), (HASHED, raw)):
        model = models[name] = model_of(name, setup, plan, world_size, universe)
        contestants.append(barred_step(name, model, ids.batches(), gradient))
    ours, theirs = (models[name](dense.batches()[-1]).to_dict() for name in (STATIC, TORCHREC))
    for key, pooled in ours.items():  # TorchRec's columns are in the order of ranks
        check_close(f"{plan}, {key}", theirs[key], pooled)
    for contestant in contestants:
        contestant.run(-1)
    facts = {**setup.facts("uniform"), "processes": world_size, "optimizer": OPTIMIZER.name, "plan": plan}
    facts["threads"] = torch.get_num_threads()
    return list(compare_all(f"sharded/{plan}/{world_size}", contestants, setup, facts, PAIRS))


def barred_step(name: str, model: nn.Module, batches: list[KeyedJaggedTensor], gradient: torch.Tensor) -> Contestant:
    """A contestant whose step is over when it is over on all ranks."""

    def step(iteration: int) -> None:
        model(batches[iteration]).values().backward(gradient)
        dist.barrier()

    return Contestant(name, step)


def model_of(name: str, setup: Setup, plan: str, world_size: int, universe: int) -> nn.Module:
    """The sharded model of a contestant, ``TORCHREC``, ``STATIC`` or ``HASHED``; all ranks call it."""
    torch.manual_seed(0)
    collection = standard_collection(setup)
    attach(collection, OPTIMIZER)
    if name != TORCHREC:
        collection = recfx.convert(
            collection, hashing=None if name == STATIC else recfx.HashConfig(dense_rows=0), verify=False
        )
    if name == HASHED:
        for index in collection.hash_indexes.values():
            index.insert(mix64(torch.arange(universe)))
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
