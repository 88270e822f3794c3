"""What was trained before it is sharded goes on: weights, ids and optimizer state; and the module itself stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig

import recfx
from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from recfx.collections.sharding.shard import shard_collection
from tests.builders.optimizers import attach
from tests.sharding.cases import Case, Model, Table, batches, build, plan_of, with_optimizer
from tests.sharding.ranks import ranks
from tests.sharding.stateful import (
    ADMIT,
    LRU,
    assert_same,
    case_of,
    make,
    model_state,
    optimizer_state,
    train,
    whole_state,
)


def sharded(case: Case, converted: Any, world_size: int) -> ShardedHashEmbeddingBagCollection:
    plan = plan_of(case, converted, world_size)
    return shard_collection(converted, plan, ShardingEnv.from_process_group(dist.group.WORLD))


def go_on(rank: int, world_size: int, case: Case, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Two more steps, of a model that has made some unsharded."""
    model = make(case, 0, seed=7)
    assert isinstance(model, Model)
    converted: Any = model.sparse
    converted.load_state_dict(model_state(before))
    converted.fused_optimizer.load_state_dict(optimizer_state(before))
    weight = converted.weight("b")
    weight.data = weight.data.t().contiguous().t()  # stored column by column
    collection = model.sparse = sharded(case, converted, world_size)
    assert_same(whole_state(model), before)
    assert all(parameter.is_contiguous() for parameter in collection.parameters())
    train(model, case, rank, world_size, 2, 4)
    state = whole_state(model)
    model.sparse = converted
    assert_same(whole_state(model), before)
    return state


@pytest.mark.parametrize(
    ("plan", "hashing", "optimizer"),
    [
        ("mixed", LRU, "adagrad"),
        ("columns", ADMIT, "adam"),
        ("rows", None, "rowwise_adagrad"),
        ("replicas", LRU, "adam"),
    ],
)
def test_training_goes_on_sharded(plan: str, hashing: recfx.HashConfig | None, optimizer: str) -> None:
    case = case_of(plan, hashing, optimizer)
    whole = make(case, 0)
    train(whole, case, 0, 0, 0, 2)
    before = whole_state(whole)
    train(whole, case, 0, 0, 2, 4)
    for state in ranks(2).run(go_on, case, before):
        assert_same(state, whole_state(whole), exact=False)


def frozen(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """Tables a and c are not trained."""
    standard, width = build(case)
    model = Model(standard, width)
    for name in ("a", "c"):
        standard.embedding_bags[name].weight.requires_grad_(False)
    attach([parameter for parameter in standard.parameters() if parameter.requires_grad], torch.optim.Adagrad, lr=0.1)
    model.sparse = collection = sharded(case, recfx.convert(standard), world_size)
    train(model, case, rank, world_size, 0, 2)
    trained = {shard.table.name: collection.store.weight(shard.name) for shard in collection.sharding.local()}
    assert all(weight.requires_grad == (name in "bd") for name, weight in trained.items())
    reasons = [reason.code for reason in recfx.explain(model).reasons]
    assert "default_fused_optimizer" not in reasons
    plain: Any = recfx.unconvert(model)
    return {
        "fused": sorted(collection.fused),
        "weights": {name: weight.detach() for name, weight in plain.sparse.named_parameters()},
        "trained": [name for name, weight in plain.sparse.named_parameters() if weight.requires_grad],
        "stepped": [name for name, w in plain.sparse.named_parameters() if hasattr(w, "_in_backward_optimizers")],
    }


@pytest.mark.parametrize("plan", ["rows", "mixed"])
def test_frozen_tables_stay_as_they_are_and_come_back_frozen(plan: str) -> None:
    case = case_of(plan, None)
    standard, _ = build(case)
    for answer in ranks(2).run(frozen, case):
        names = [f"embedding_bags.{table}.weight" for table in "bd"]
        assert (answer["fused"], answer["trained"], answer["stepped"]) == (["b", "d"], names, names)
        for name, weight in standard.named_parameters():
            assert torch.equal(answer["weights"][name], weight) == (name not in names)


def from_meta(rank: int, world_size: int) -> list[tuple[str, torch.dtype, torch.device, list[float]]]:
    """Tables on meta; rank 1 gets no shard of them if the plan says so."""

    def collection(kind: tuple[Any, ...]) -> ShardedHashEmbeddingBagCollection:
        tables = (Table("a", 8, 4, ("f0",), "SUM", kind), Table("b", 8, 4, ("f1",), "SUM", kind))
        configs = [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=list(table.features),
                data_type=dtype,
                init_fn=lambda weight: weight.fill_(0.25),
            )
            for table, dtype in zip(tables, (DataType.FP32, DataType.FP16), strict=True)
        ]
        standard = EmbeddingBagCollection(configs, device=torch.device("meta"))
        return sharded(Case(tables), recfx.convert(standard), world_size)

    alone = collection(("table_wise", 0))
    ids = torch.tensor([rank, 3 + rank])
    pooled = alone(KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.tensor([1, 1]))).values()
    assert torch.equal(pooled, torch.full((1, 8), 0.25))
    assert len(list(alone.parameters())) == (2, 0)[rank]
    named = collection(("row_wise",)).named_parameters()
    return [(name, weight.dtype, weight.device, weight.unique().tolist()) for name, weight in named]


def test_tables_on_meta_are_made_and_initialised_where_their_shards_are() -> None:
    cpu = torch.device("cpu")
    expected = [
        ("embedding_bags.a.weight", torch.float32, cpu, [0.25]),
        ("embedding_bags.b.weight", torch.float16, cpu, [0.25]),
    ]
    assert ranks(2).run(from_meta) == [expected] * 2


def halves(rank: int, world_size: int) -> torch.Tensor:
    """A table of float16, two thirds of it on other ranks."""
    case = Case((Table("a", 9, 4, ("f0",), "SUM", ("row_wise",)),))
    standard = build(case)[0].half()
    collection = sharded(case, recfx.convert(standard), world_size)
    plain = recfx.unconvert(nn.ModuleDict({"sparse": collection}))
    assert torch.equal(plain["sparse"].embedding_bags["a"].weight, standard.embedding_bags["a"].weight)  # type: ignore[index]
    return plain["sparse"].embedding_bags["a"].weight.detach()  # type: ignore[index]


def test_weights_are_gathered_in_their_own_dtype() -> None:
    assert {weight.dtype for weight in ranks(2).run(halves)} == {torch.float16}


REPLICATED = Case((Table("a", 32, 8, ("f0",), "SUM", ("data_parallel",)),), hashing=recfx.HashConfig(dense_rows=0))


def replicas(rank: int, world_size: int, states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Each rank brings ids of its own, which stay with the unsharded module."""
    converted: Any = recfx.convert(build(REPLICATED)[0], hashing=REPLICATED.hashing)
    converted.load_state_dict(states[rank])
    collection = sharded(REPLICATED, converted, world_size)
    assert_same(converted.state_dict(), states[rank])
    return {name: value.clone() for name, value in collection.state_dict().items()}


def test_replicas_of_an_index_begin_with_the_ids_of_rank_0() -> None:
    states = []
    for number in range(2):
        converted: Any = recfx.convert(build(REPLICATED)[0], hashing=REPLICATED.hashing)
        ids = torch.arange(5 + number) * 1000 + number
        converted(KeyedJaggedTensor(["f0"], ids, lengths=torch.ones(len(ids), dtype=torch.int64)))
        states.append(converted.state_dict())
    for state in ranks(2).run(replicas, states):
        assert_same(state, states[0])


STATIC_REPLICAS = (Table("a", 11, 8, ("f0",), "SUM", ("data_parallel",)),)


def shard_what_was_trained_apart(rank: int, world_size: int, optimizer: str) -> dict[str, Tensor]:
    """Each rank trains a collection of its own first, rank 1 for longer."""
    case = Case(STATIC_REPLICAS, optimizer=optimizer)
    standard: EmbeddingBagCollection = build(case)[0]
    module = with_optimizer(case, recfx.convert(standard))
    assert isinstance(module, recfx.HashEmbeddingBagCollection)
    for step in batches(case, world_size, 1 + rank):
        module(step[rank]).values().sum().backward()
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = shard_collection(module, plan_of(case, module, world_size), env)
    fused = sharded.store.optimizers["a"]
    return {"weight": sharded.store.weight("a").detach(), **fused.named_state()}


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "adam"])
def test_replicas_begin_with_the_weights_and_optimizer_state_of_rank_0(optimizer: str) -> None:
    first, second = ranks(2).run(shard_what_was_trained_apart, optimizer)
    assert first.keys() == second.keys()
    assert len(first) > 1
    for name, value in first.items():
        assert bool(value.any()), name
        assert torch.equal(value, second[name]), name
