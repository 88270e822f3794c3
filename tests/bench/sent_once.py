"""``sent_once``: steps on two ranks in which each different id is sent once, against ids that are sent as they come.

Ids follow power laws, and tables are cut by rows. The bytes that ranks pass to collectives are counted in both cases,
and have to be those that ``recfx.cost`` predicts. This is gloo on one host, where a byte on the wire costs little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.shard import shard_collection
from recfx.ir.dedup import different
from tests.bench.harness import Contestant, Result, compare_all
from tests.bench.own_process import cases_on_ranks
from tests.bench.setup import Setup, feature_names
from tests.bench.workload import OPTIMIZERS, attach, standard_collection
from tests.sharding.recorded import recorded

ONCE, AS_THEY_COME = "each different id once", "ids as they come"
EXPONENTS = (1.05, 1.2, 1.5)
WORLD_SIZE = 2
OPTIMIZER = OPTIMIZERS[2]
_TABLES = 4


def run(setup: Setup) -> Iterator[Result]:
    """One step, forward and backward with the fused optimizer, from this rank's KJT."""
    yield from cases_on_ranks(WORLD_SIZE, _measure, replace(setup, tables=_TABLES, pooling="NONE"), EXPONENTS)


def _measure(setup: Setup, exponent: float) -> list[Result]:
    batches = _batches(setup, exponent)
    models = {ONCE: _model(setup, True), AS_THEY_COME: _model(setup, False)}
    facts: dict[str, Any] = setup.facts(f"power law {exponent}")
    facts |= {"processes": WORLD_SIZE, "optimizer": OPTIMIZER.name}
    for name, model in models.items():
        facts[f"bytes, {name}"] = _sent(model, batches[-1])
    counts = [batches[-1][key].values() for key in batches[-1].keys()]  # noqa: SIM118 (a KeyedJaggedTensor is no dict)
    facts["different"] = sum(ids.unique().numel() for ids in counts) / sum(ids.numel() for ids in counts)
    contestants = [_step(name, model, batches) for name, model in models.items()]
    return list(compare_all(f"sent_once/{exponent}", contestants, setup, facts, [(ONCE, AS_THEY_COME)]))


def _sent(model: ShardedCollection, features: KeyedJaggedTensor) -> int:
    """The bytes that all ranks pass to collectives in a step, which are those that are predicted."""
    sent = sum(size for _, size in recorded(lambda: _backward(model, features)))
    lengths = {}
    for key in features.keys():  # noqa: SIM118
        ids = features[key].values()
        lengths |= {key: ids.numel() / features.stride(), different(key): ids.unique().numel() / features.stride()}
    predicted = recfx.cost(model).at(features.stride(), L=lengths).totals.wire_bytes
    both = torch.tensor([sent, predicted], dtype=torch.float64)
    dist.all_reduce(both)  # how many ids go to which rank depends on the ids, but not how many go to all
    if abs(both[0] - both[1]) > 1:  # of millions
        raise AssertionError(f"{both[0]} bytes were sent, but {both[1]} were predicted")
    return int(both[0])


def _backward(model: ShardedCollection, features: KeyedJaggedTensor) -> None:
    torch.cat([rows.values() for rows in model(features).values()]).sum().backward()


def _step(name: str, model: ShardedCollection, batches: list[KeyedJaggedTensor]) -> Contestant:
    def step(iteration: int) -> None:
        _backward(model, batches[iteration])
        dist.barrier()

    step(-1)
    return Contestant(name, step)


def _model(setup: Setup, dedup: bool) -> ShardedCollection:
    torch.manual_seed(0)
    standard = standard_collection(setup)
    attach(standard, OPTIMIZER)
    per_table = dict.fromkeys(standard.embeddings, sharding_plan.row_wise())
    plan = sharding_plan.construct_module_sharding_plan(
        standard, per_table, sharder=EmbeddingCollectionSharder(), local_size=WORLD_SIZE, world_size=WORLD_SIZE,
        device_type="cpu",
    )  # fmt: skip
    converted: Any = recfx.convert(standard, hashing=None, dedup=dedup, verify=False)
    return shard_collection(converted, dict(plan), ShardingEnv.from_process_group(dist.group.WORLD))


def _batches(setup: Setup, exponent: float) -> list[KeyedJaggedTensor]:
    """Make batches that are equal on all ranks."""
    generator = torch.Generator().manual_seed(3)
    shares = torch.arange(1, setup.rows + 1, dtype=torch.float64).pow(-exponent).cumsum(0)
    order = torch.randperm(setup.rows, generator=generator)  # popular ids are anywhere
    count = setup.tables * setup.batch * setup.bag_length
    lengths = torch.full((setup.tables * setup.batch,), setup.bag_length)
    return [
        KeyedJaggedTensor(
            feature_names(setup),
            order[torch.searchsorted(shares, torch.rand(count, generator=generator, dtype=torch.float64) * shares[-1])],
            lengths=lengths,
        )
        for _ in range(setup.iterations + setup.warm_up + 1)
    ]
