"""What a sharded collection sends and keeps is, byte for byte, what its cost says."""

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.collections.sharding.collection import ShardedCollection
from recfx.ir.dedup import different
from recfx.planner.pricing.hardware import CPU_HOST, H100
from tests.sharding.cases import (
    FORMS,
    OPTIMIZERS,
    Case,
    Model,
    batches,
    build,
    plan_of,
    shard,
    values_of,
    with_optimizer,
)
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.recorded import recorded
from tests.sharding.typical_cases import CONFIGS, TYPES, hashed_case, one_type
from tests.support.pairwise import pairwise


def lengths_of(features: KeyedJaggedTensor) -> dict[str, Fraction]:
    """The mean length of every feature, and of its different ids."""
    keys = list(features.keys())
    lengths = {key: Fraction(int(features[key].lengths().sum()), features.stride()) for key in keys}
    sent_once = {different(key): Fraction(features[key].values().unique().numel(), features.stride()) for key in keys}
    return {**lengths, **sent_once}


def stored(tensors: Iterable[Any]) -> int:
    """Bytes of the storages of ``tensors``, each counted once."""
    bytes_of_storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            bytes_of_storages[storage._cdata] = storage.nbytes()
    return sum(bytes_of_storages.values())


def kept(sharded: ShardedCollection) -> tuple[int, int, int]:
    """Bytes of weights, optimizer state and indexes on this rank; there are no other buffers."""
    state = [value for optimizer in sharded.store.optimizers.values() for value in optimizer.state.values()]
    return stored(sharded.parameters()), stored(state), stored(sharded.buffers())


def step_and_cost(rank: int, world_size: int, case: Case) -> tuple[Any, ...]:
    """What this rank sends and keeps, with its price; totals of its nodes and of the rank. Of rows that are not pooled
    a rank sends as many as ids have arrived: all ranks have as many of each feature.
    """
    standard, _ = build(case)
    sharded = shard(case, standard, world_size)
    features = batches(case, world_size, 1)[0][rank if case.is_pooled else 0]
    results: list[torch.Tensor] = []
    sent = recorded(lambda: results.append(values_of(sharded(features))))
    sent += recorded(lambda: results[0].sum().backward())
    cost = recfx.cost(sharded, H100)
    at = cost.at(features.stride(), L=lengths_of(features))
    resident = cost.totals.resident
    assert (cost.rank, cost.world_size) == (rank, world_size)
    sizes = ("read_bytes", "written_bytes", "flops", "wire_bytes", "resident_bytes")
    return (
        (sum(size for _, size in sent), kept(sharded)),
        (at.totals.wire_bytes, (resident.weights, resident.optimizer, resident.index)),
        [(getattr(at.totals, name), getattr(at.ranks[rank], name)) for name in sizes],
    )


def check(case: Case, world_size: int) -> None:
    """A rank sends and keeps what is predicted, and what is planned for it is what its graph does."""
    answers = ranks(world_size).run(step_and_cost, case)
    assert in_total(case, [measured[0] for measured, *_ in answers]) == pytest.approx(
        in_total(case, [predicted[0] for _, predicted, *_ in answers]), abs=1e-3
    )
    for measured, predicted, totals in answers:
        assert measured[1] == predicted[1]
        assert world_size == 1 or measured[0]
        for of_nodes, of_rank in totals:
            assert of_rank == pytest.approx(of_nodes)


def in_total(case: Case, sent: list[float]) -> list[float]:
    """The bytes of every rank; of all ranks if it depends on the ids how many rows each of them sends back."""
    is_cut = any(table.sharding[0] in ("row_wise", "table_row_wise", "grid_shard") for table in case.tables)
    return sent if case.is_pooled or not is_cut else [sum(sent)]


@pairwise(kind=sorted(TYPES), config=["static", "lfu_admit", "error"], world_size=[1, 2, 4], form=FORMS)
def test_every_type(kind: str, config: str, world_size: int, form: str) -> None:
    local_size = 2 if world_size == 4 else 0
    hashed = hashed_case(kind, config, local_size=local_size) if config != "static" else None
    check(FORMS[form](hashed or one_type(kind, local_size=local_size, optimizer="adagrad")), world_size)


OTHERS = [
    *(hashed_case("row_wise", config) for config in sorted(CONFIGS.keys() - {"lfu_admit", "error"})),
    # Settings change no sizes: each class once.
    *(
        one_type("column_wise", optimizer=name)
        for name in {kind: name for name, (kind, _) in OPTIMIZERS.items()}.values()
    ),
    *(one_type(kind, is_weighted=True) for kind in ("table_wise", "row_wise", "data_parallel")),
]


@pytest.mark.parametrize("case", OTHERS, ids=range(len(OTHERS)))
def test_every_kind_of_index_and_optimizer_and_weights(case: Case) -> None:
    check(case, 2)


@on_ranks(2)
def test_gradients_of_the_rest_of_the_model_are_averaged(rank: int, world_size: int) -> None:
    """The bytes of DistributedDataParallel's all-reduces; predicted before and after sharding."""
    case = one_type("row_wise")
    standard, width = build(case)
    model = Model(standard, width)
    model.over.bias.requires_grad_(False)
    plan = ShardingPlan({"sparse": plan_of(case, recfx.convert(model, verify=False).sparse, world_size)})
    planned = recfx.cost(model, H100, plan=plan, world_size=world_size)
    sharded = recfx.convert(model, plan=plan, env=ShardingEnv.from_process_group(dist.group.WORLD), verify=False)
    parallel = nn.parallel.DistributedDataParallel(sharded)
    parallel(batches(case, world_size, 1)[0][rank])[0].backward()
    buckets = parallel._get_ddp_logging_data()["bucket_sizes"]
    cost = recfx.cost(parallel, H100)
    of_eval = recfx.cost(parallel.eval(), H100)
    buckets, (planned, sharded, of_eval) = (
        buckets,
        [(price.nodes[-1].name, price.at(4).nodes[-1].wire_bytes) for price in (planned, cost, of_eval)],
    )
    assert planned == sharded == ("dense_all_reduce", int(buckets))
    assert of_eval == ("dense", 0)


def nodes_of_plan(rank: int, world_size: int, case: Case, backend: str) -> tuple[list[str], list[str], float, float]:
    """The names of the nodes that are priced before and after sharding, and the predicted times."""
    standard, _ = build(case)
    converted = recfx.convert(nn.ModuleDict({"sparse": standard}), hashing=case.hashing, backend=backend)
    with_optimizer(case, converted["sparse"])
    plan = ShardingPlan({"sparse": plan_of(case, converted["sparse"], world_size)})
    planned = recfx.cost(converted, CPU_HOST, plan=plan, world_size=world_size)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = recfx.cost(recfx.convert(converted, plan=plan, env=env), CPU_HOST)
    names = [[node.name for node in cost.nodes] for cost in (planned, sharded)]
    return names[0], names[1], planned.at(64, L=3).seconds, sharded.at(64, L=3).seconds


@pytest.mark.parametrize(("backend", "is_fused"), [("auto", True), ("cpu", True), ("reference", False)])
def test_the_price_is_that_of_the_kernels_that_will_run(backend: str, is_fused: bool) -> None:
    """Not every kernel finds rows itself."""
    case = hashed_case("row_wise", "error")
    planned, sharded, seconds, of_sharded = ranks(2).run(nodes_of_plan, case, backend)[0]
    assert planned == sharded
    assert ("sparse_hash_lookup" in planned) == is_fused
    assert seconds == of_sharded
