"""What was trained before it is sharded goes on: weights, ids and optimizer state; and the module itself stays."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig

import recfx
from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from recfx.runtime.in_flight import on_a_copy
from tests.builders.optimizers import attach
from tests.sharding.cases import Case, Model, Table, batches, build, shard_converted, with_optimizer
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.stateful import assert_same, case_of, train


@pytest.mark.parametrize("plan", ["rows", "mixed"])
@on_ranks(2)
def test_frozen_tables_stay_as_they_are_and_come_back_frozen(rank: int, world_size: int, plan: str) -> None:
    """Tables a and c are not trained."""
    case = case_of(plan, None)
    standard, _ = build(case)
    standard, width = build(case)
    model = Model(standard, width)
    for name in ("a", "c"):
        standard.embedding_bags[name].weight.requires_grad_(False)
    attach([parameter for parameter in standard.parameters() if parameter.requires_grad], torch.optim.Adagrad, lr=0.1)
    model.sparse = collection = shard_converted(case, recfx.convert(standard), world_size)
    train(model, case, rank, world_size, 0, 2)
    trained = {shard.table.name: collection.store.weight(shard.name) for shard in collection.sharding.local()}
    assert all(weight.requires_grad == (name in "bd") for name, weight in trained.items())
    reasons = [reason.code for reason in recfx.explain(model).reasons]
    assert "default_fused_optimizer" not in reasons
    plain: Any = recfx.unconvert(model)
    answer = {
        "fused": sorted(collection.fused),
        "weights": {name: weight.detach() for name, weight in plain.sparse.named_parameters()},
        "trained": [name for name, weight in plain.sparse.named_parameters() if weight.requires_grad],
        "stepped": [name for name, w in plain.sparse.named_parameters() if hasattr(w, "_in_backward_optimizers")],
    }
    names = [f"embedding_bags.{table}.weight" for table in "bd"]
    assert (answer["fused"], answer["trained"], answer["stepped"]) == (["b", "d"], names, names)
    for name, weight in standard.named_parameters():
        assert torch.equal(answer["weights"][name], weight) == (name not in names)


@on_ranks(2)
def test_tables_on_meta_are_made_and_initialised_where_their_shards_are(rank: int, world_size: int) -> None:
    """Tables on meta; rank 1 gets no shard of them if the plan says so."""
    cpu = torch.device("cpu")
    expected = [
        ("embedding_bags.a.weight", torch.float32, cpu, [0.25]),
        ("embedding_bags.b.weight", torch.float16, cpu, [0.25]),
    ]

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
        return shard_converted(Case(tables), recfx.convert(standard), world_size)

    alone = collection(("table_wise", 0))
    ids = torch.tensor([rank, 3 + rank])
    pooled = alone(KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.tensor([1, 1]))).values()
    assert torch.equal(pooled, torch.full((1, 8), 0.25))
    assert len(list(alone.parameters())) == (2, 0)[rank]
    named = collection(("row_wise",)).named_parameters()
    assert [(name, weight.dtype, weight.device, weight.unique().tolist()) for name, weight in named] == expected


@on_ranks(2)
def test_weights_are_gathered_in_their_own_dtype(rank: int, world_size: int) -> None:
    """A table of float16, two thirds of it on other ranks."""
    case = Case((Table("a", 9, 4, ("f0",), "SUM", ("row_wise",)),))
    standard = build(case)[0].half()
    collection = shard_converted(case, recfx.convert(standard), world_size)
    plain = recfx.unconvert(nn.ModuleDict({"sparse": collection}))
    weight = plain["sparse"].embedding_bags["a"].weight  # type: ignore[index]
    assert weight.dtype == torch.float16
    assert torch.equal(weight, standard.embedding_bags["a"].weight)


REPLICAS = (Table("a", 32, 8, ("f0",), "SUM", ("data_parallel",)),)


def shard_what_was_trained_apart(
    rank: int, world_size: int, optimizer: str, hashing: recfx.HashConfig | None
) -> dict[str, Tensor]:
    """Each rank trains a collection of its own first, rank 1 for longer; its rows and ids stay with that."""
    case = Case(REPLICAS, optimizer=optimizer, hashing=hashing, raw_ids=10 if hashing else 0)
    module: Any = with_optimizer(case, recfx.convert(build(case)[0], hashing=hashing))
    with on_a_copy():  # or its index would be refused here
        for step in batches(case, world_size, 1 + rank):
            module(step[rank]).values().sum().backward()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    collection = shard_converted(case, module, world_size)
    assert_same(module.state_dict(), before)
    tensors = {name: value.clone() for name, value in collection.state_dict().items() if "counts" not in name}
    return {**tensors, **collection.store.optimizers["a"].named_state()}


@pytest.mark.parametrize(
    ("optimizer", "hashing"),
    [("adagrad", None), ("rowwise_adagrad", None), ("adam", None), ("adagrad", recfx.HashConfig(dense_rows=0))],
)
def test_replicas_begin_with_the_weights_ids_and_optimizer_state_of_rank_0(
    optimizer: str, hashing: recfx.HashConfig | None
) -> None:
    first, second = ranks(2).run(shard_what_was_trained_apart, optimizer, hashing)
    assert_same(second, first)
    assert len(first) > (4 if hashing else 1)
    states = [value for name, value in first.items() if "." not in name]
    assert states
    assert all(bool(value.any()) for value in states)
