"""What a sharded collection sends and keeps is, byte for byte, what its cost says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest
import sympy
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from recfx.planner.pricing.graph_prices import price_graph
from recfx.planner.pricing.hardware import CPU_HOST, H100
from recfx.planner.pricing.planned_collection import planned_as_sharded, planned_graph
from recfx.planner.pricing.work import Work
from tests.sharding.cases import OPTIMIZERS, Case, Model, batches, build, plan_of, shard, with_optimizer
from tests.sharding.ranks import ranks
from tests.sharding.recorded import recorded
from tests.sharding.typical_cases import CONFIGS, TYPES, hashed_case, one_type, random_case


def lengths_of(features: KeyedJaggedTensor) -> dict[str, Fraction]:
    """The mean length of every feature."""
    keys = list(features.keys())
    return {key: Fraction(int(features[key].lengths().sum()), features.stride()) for key in keys}


def stored(tensors: Iterable[Any]) -> int:
    """Bytes of the storages of ``tensors``, each counted once."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def kept(sharded: ShardedHashEmbeddingBagCollection) -> tuple[int, int, int]:
    """Bytes of weights, optimizer state and indexes on this rank; there are no other buffers."""
    state = [value for optimizer in sharded.store.optimizers.values() for value in optimizer.state.values()]
    return stored(sharded.parameters()), stored(state), stored(sharded.buffers())


def step_and_cost(rank: int, world_size: int, case: Case) -> tuple[Any, ...]:
    standard, _ = build(case)
    sharded = shard(case, standard, world_size)
    features = batches(case, world_size, 1)[0][rank]
    results: list[torch.Tensor] = []
    sent = recorded(lambda: results.append(sharded(features).values()))
    sent += recorded(lambda: results[0].sum().backward())
    cost = recfx.cost(sharded, H100)
    at = cost.at(features.stride(), L=lengths_of(features))
    resident = cost.resident
    assert (cost.rank, cost.world_size) == (rank, world_size)
    assert at.totals.wire_bytes == sum(node.wire_bytes for node in at.nodes)
    return (
        sum(size for _, size in sent),
        at.totals.wire_bytes,
        kept(sharded),
        (resident.weights, resident.optimizer, resident.index),
    )


def check(case: Case, world_size: int) -> None:
    for sent, predicted, stays, resident in ranks(world_size).run(step_and_cost, case):
        assert sent == predicted
        assert stays == resident
        assert world_size == 1 or sent


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_static_tables(kind: str, world_size: int) -> None:
    check(one_type(kind, local_size=2 if world_size == 4 else 0, optimizer="adagrad"), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_hashed_tables(kind: str, world_size: int) -> None:
    check(hashed_case(kind, "lfu_admit", local_size=2 if world_size == 4 else 0), world_size)


def step_and_cost_of_ranks(rank: int, world_size: int, case: Case) -> tuple[Any, ...]:
    """What this rank sends, and what is predicted for it by each of two ways to ask."""
    standard, _ = build(case)
    sharded = shard(case, standard, world_size)
    everybody = batches(case, world_size, 1)[0]
    results: list[torch.Tensor] = []
    sent = recorded(lambda: results.append(sharded(everybody[rank]).values()))
    sent += recorded(lambda: results[0].sum().backward())
    sizes = [features.stride() for features in everybody]
    lengths = [lengths_of(features) if features.stride() else 0 for features in everybody]
    cost = recfx.cost(sharded, H100)
    of_all, of_own = cost.at(sizes, L=lengths), cost.at(sizes, L=lengths[rank])
    assert (of_all.batch, of_all.batches) == (sizes[rank], tuple(sizes))
    return sum(size for _, size in sent), of_own.totals.wire_bytes, [each.wire_bytes for each in of_all.ranks]


@pytest.mark.parametrize("sizes", [(4, 1, 0, 3), (2, 3, 3, 2)])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_batches_of_different_sizes(kind: str, world_size: int, sizes: tuple[int, ...]) -> None:
    """Two hosts of two ranks each: the sums of (2, 3, 3, 2) over hosts are equal, and so a reduce-scatter remains."""
    case = one_type(kind, local_size=2 if world_size == 4 else 0, sizes=sizes)
    answers = ranks(world_size).run(step_and_cost_of_ranks, case)
    sent = [each for each, _, _ in answers]
    assert sent == [own for _, own, _ in answers]
    for _, _, of_ranks in answers:
        assert of_ranks == sent


@pytest.mark.parametrize("number", [0, 2, 3, 8])
def test_batches_of_different_sizes_of_mixed_plans(number: int) -> None:
    answers = ranks(4).run(step_and_cost_of_ranks, random_case(number, 4))
    sent = [each for each, _, _ in answers]
    assert sent == [own for _, own, _ in answers]
    assert all(of_ranks == sent for _, _, of_ranks in answers)


@pytest.mark.parametrize(
    ("batch_sizes", "lengths", "what"),
    [
        ([4], 1, "B has 1 entries, but there are 2 ranks"),
        ([4, 4, 4], 1, "B has 3 entries, but there are 2 ranks"),
        ([4, -1], 1, "B is -1"),
        ([4, 2.5], 1, "B is 2.5"),
        (4, [1], "L has 1 entries, but there are 2 ranks"),
    ],
)
def test_refuses_other_numbers_of_batches(batch_sizes: Any, lengths: Any, what: str) -> None:
    model = nn.ModuleDict({"ebc": build(one_type("table_wise"))[0]})
    with pytest.raises(recfx.InputError) as caught:
        recfx.cost(model, Topology(2, "cpu")).at(batch_sizes, L=lengths)
    assert caught.value.reason == "invalid_argument"
    assert what in str(caught.value)


def trained_beside(rank: int, world_size: int, case: Case) -> tuple[Any, ...]:
    """The bytes of DistributedDataParallel's all-reduces; predicted before and after sharding."""
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
    return buckets, [(each.nodes[-1].name, each.at(4).nodes[-1].wire_bytes) for each in (planned, cost, of_eval)]


def test_gradients_of_the_rest_of_the_model_are_averaged() -> None:
    for buckets, (planned, sharded, of_eval) in ranks(2).run(trained_beside, one_type("row_wise")):
        assert planned == sharded == ("dense_all_reduce", int(buckets))
        assert of_eval == ("dense", 0)


@pytest.mark.parametrize("config", sorted(CONFIGS))
def test_every_kind_of_index(config: str) -> None:
    check(hashed_case("row_wise", config), 2)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_optimizer(optimizer: str) -> None:
    check(one_type("column_wise", optimizer=optimizer), 2)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_weights_of_ids_travel_too(kind: str) -> None:
    check(one_type(kind, is_weighted=True), 2)
    check_plan(one_type(kind, is_weighted=True), 2)


def graph_and_collection(rank: int, world_size: int, case: Case) -> tuple[Any, ...]:
    standard, _ = build(case)
    sharded = shard(case, standard, world_size)
    of_graph, of_collection = recfx.cost(sharded.graph_module, H100), recfx.cost(sharded, H100)
    return of_graph.nodes, of_collection.nodes, of_graph.rank, of_graph.world_size


def test_the_graph_of_a_rank_costs_what_its_collection_costs() -> None:
    case = hashed_case("row_wise", "lru")
    for number, (graph, collection, rank, world_size) in enumerate(ranks(2).run(graph_and_collection, case)):
        assert graph == collection
        assert (rank, world_size) == (number, 2)


@pytest.mark.parametrize("number", [1, 3, 4])
def test_mixed_plans(number: int) -> None:
    check(Case(**{**random_case(number, 4).__dict__, "sizes": (3,)}), 4)


def nodes_and_plan(rank: int, world_size: int, case: Case) -> tuple[list[Any], list[Any], list[Any]]:
    """The nodes of this rank's graph, those of the graph that is planned for it, and totals of both."""
    standard, _ = build(case)
    sharded = shard(case, standard, world_size)
    planned = planned_as_sharded(sharded, "cpu")
    nodes = price_graph(planned_graph(planned, rank).graph, trains=True)
    at = recfx.cost(sharded, H100).at(5, L=3)
    own = at.ranks[rank]
    totals = [
        (getattr(at.totals, name), getattr(own, name))
        for name in ("read_bytes", "written_bytes", "flops", "wire_bytes", "resident_bytes")
    ]
    return list(recfx.cost(sharded, H100).nodes), nodes, totals


def check_plan(case: Case, world_size: int) -> None:
    for graph, planned, totals in ranks(world_size).run(nodes_and_plan, case):
        assert [node.name for node in planned] == [node.name for node in graph]
        for found, expected in zip(planned, graph, strict=True):
            for field in fields(found):
                ours, theirs = getattr(found, field.name), getattr(expected, field.name)
                if isinstance(ours, Work):
                    for each in fields(ours):
                        difference = getattr(ours, each.name) - getattr(theirs, each.name)
                        assert sympy.simplify(difference) == 0, (found.name, field.name, each.name)
                else:
                    assert ours == theirs, (found.name, field.name)
        for expected, found in totals:
            assert found == pytest.approx(expected)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_planned_nodes_are_those_of_the_graph(kind: str, world_size: int) -> None:
    check_plan(one_type(kind, local_size=2 if world_size == 4 else 0, optimizer="adagrad"), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_planned_nodes_of_hashed_tables(kind: str, world_size: int) -> None:
    check_plan(hashed_case(kind, "error", local_size=2 if world_size == 4 else 0), world_size)


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_planned_nodes_of_mixed_plans(number: int) -> None:
    check_plan(random_case(number, 4), 4)


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


@pytest.mark.parametrize(
    ("backend", "is_fused"),
    [("auto", True), ("cpu", True), ("reference", False)],
)
def test_the_price_is_that_of_the_kernels_that_will_run(backend: str, is_fused: bool) -> None:
    """Not every kernel finds rows itself."""
    case = hashed_case("row_wise", "error")
    planned, sharded, seconds, of_sharded = ranks(2).run(nodes_of_plan, case, backend)[0]
    assert planned == sharded
    assert ("sparse_hash_lookup" in planned) == is_fused
    assert seconds == of_sharded
