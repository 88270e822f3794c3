"""What a sharded collection sends and keeps is, byte for byte, what its cost says."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

import recfx
from recfx.pricing.hardware import H100
from recfx.sharding.collection import ShardedHashEmbeddingBagCollection
from tests.sharding.cases import Case, batches, build, shard
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
    """Bytes of weights, optimizer state and indexes on this rank."""
    state = [value for optimizer in sharded.store.optimizers.values() for value in optimizer.state.values()]
    return stored(sharded.parameters()), stored(state), stored(sharded.hash_indexes.buffers())


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


@pytest.mark.parametrize("config", sorted(CONFIGS))
def test_every_kind_of_index(config: str) -> None:
    check(hashed_case("row_wise", config), 2)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_every_optimizer(optimizer: str) -> None:
    check(one_type("column_wise", optimizer=optimizer), 2)


@pytest.mark.parametrize("number", [1, 3, 4])
def test_mixed_plans(number: int) -> None:
    check(Case(**{**random_case(number, 4).__dict__, "sizes": (3,)}), 4)
