"""A batch that a model's second collection refuses, on one rank or on all: the first one has never seen it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.errors import InputError, OutOfStepError
from tests.builders.batches import bags
from tests.builders.collections import table
from tests.builders.optimizers import attach
from tests.sharding.cases import Case, Table, plan_of
from tests.sharding.pipelined import CPU, PIPELINES, Batch, collections, what_is_left
from tests.sharding.ranks import ranks

TYPES: dict[str, tuple[Any, ...]] = {
    "table_wise": ("table_wise", 1),
    "row_wise": ("row_wise",),
    "column_wise": ("column_wise", 1, 0),
    "data_parallel": ("data_parallel",),
    "table_row_wise": ("table_row_wise", 0),
    "grid_shard": ("grid_shard", 0),
}
LRU = recfx.HashConfig(dense_rows=0, on_full="evict", buckets=2)
PLAIN = recfx.HashConfig(dense_rows=0, on_full="share", buckets=2)
ADMIT = recfx.HashConfig(dense_rows=0, on_full="evict", evict="lfu", admit_after=2, buckets=2)


@dataclass
class Pair(Batch):
    """Features of both collections."""

    other_features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Pair:
        return self


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = EmbeddingBagCollection([table("a", ["fa"], dim=8, rows=80), table("b", ["fb"], dim=8, rows=80)])
        self.second = EmbeddingBagCollection([table("c", ["fc"], dim=8, rows=80), table("s", ["fs"], dim=8, rows=8)])
        self.over = nn.Linear(32, 3)

    def forward(self, batch: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([self.first(batch.features).values(), self.second(batch.other_features).values()], 1)
        return (self.over(both).tanh() ** 2).mean(), both.detach()


def pair(number: int, rank: int, fits: bool = True) -> Pair:
    generator = torch.Generator().manual_seed(10 * number + rank)

    def ids(most: int) -> list[list[int]]:
        return (torch.randint(0, most, (4, 3), generator=generator)).tolist()

    last = ids(8) if fits else [[9]] * 4
    return Pair(bags({"fa": ids(250), "fb": ids(250)}), torch.ones(4, 2), bags({"fc": ids(250), "fs": last}))


def make(world_size: int, sharding: str, flow: str, kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Two()
    attach([*model.first.parameters(), *model.second.parameters()], "adagrad")
    # Rows of tables that neither evict nor admit are found ahead.
    hashing = {"a": LRU, "b": ADMIT, "c": LRU} if kind == "evict" else dict.fromkeys("abc", PLAIN)
    if kind == "on_one_rank":
        hashing["a"] = LRU
    converted = recfx.convert(model, hashing={**hashing, "s": None})
    # Two types in one collection hash in two nodes.
    kinds = {"a": TYPES[sharding], "b": ("table_wise", 0), "c": TYPES["row_wise"], "s": TYPES[sharding]}
    plan: dict[str, Any] = {}
    for path in ("first", "second"):
        module = converted.get_submodule(path)
        tables = tuple(
            Table(config.name, config.num_embeddings, 8, tuple(config.feature_names), "SUM", kinds[config.name])
            for config in module.embedding_bag_configs()
        )
        plan[path] = plan_of(Case(tables, local_size=world_size), module, world_size)
    if flow == "dmp":
        env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
        parallel = DistributedModelParallel(converted, env, CPU, ShardingPlan(plan), recfx.sharders())
        return parallel
    return recfx.convert(converted, plan=ShardingPlan(plan), inplace=True)


def trained(
    rank: int, world_size: int, sharding: str, flow: str, pipeline: str, kind: str, refused: tuple[int, ...]
) -> Any:
    """Outputs, what is left, and how often a batch was refused. Rank 1 has a batch that does not fit."""
    model = make(world_size, sharding, flow, kind)
    dense = [p for name, p in model.named_parameters() if "over" in name]
    runner = PIPELINES[pipeline](model, torch.optim.SGD(dense, lr=0.1), CPU)
    numbers = [number for number in range(8) for _ in range(1 + (number in refused))]
    pairs, seen = [], set()
    for number in numbers:
        is_refused = number in refused and number not in seen
        seen.add(number)
        pairs.append(pair(number + 100 * is_refused, rank, fits=not is_refused or rank != 1))
    outputs, reasons = [], []
    source: Iterator[Pair] = iter(pairs)
    while True:
        try:
            outputs.append(runner.progress(source))
        except StopIteration:
            break
        except InputError as error:
            reasons.append(error.reason)
            if pipeline == "sparse_dist":  # the rest of what it does in a step, except for the backward
                if len(runner.batches) > 1:
                    runner.wait_sparse_data_dist(runner.contexts[1])
                runner.dequeue_batch()
    state: dict[str, torch.Tensor] = what_is_left(model)
    for number, collection in enumerate(collections(model)):
        for name, optimizer in collection.store.optimizers.items():
            state |= {f"{number} {name} {key}": value.clone() for key, value in optimizer.state.items()}
        state[f"{number} turn"] = torch.tensor(collection.store.in_flight.turn)
    evicted = sum(index.counters["evicted"] for part in collections(model) for index in part.hash_indexes.values())
    return {"pooled": outputs, "left": state, "reasons": reasons, "evicted": evicted}


@functools.cache
def without_refusals(sharding: str, flow: str, kind: str) -> Any:
    """What is left when every batch fits; no pipeline changes a bit of it."""
    return ranks(2).run(trained, sharding, flow, "loop", kind, ())


@pytest.mark.parametrize(
    ("sharding", "flow", "pipeline", "kind"),
    [
        *((sharding, "convert", "loop", "evict") for sharding in TYPES),
        *(
            ("row_wise", "dmp", pipeline, kind)
            for kind in ("evict", "plain")
            for pipeline in ("loop", "sparse_dist", "recfx")
        ),
        ("table_wise", "convert", "loop", "on_one_rank"),
        ("column_wise", "convert", "recfx", "evict"),
        ("table_wise", "convert", "recfx", "plain"),
    ],
)
def test_training_goes_on_as_if_the_batch_had_never_been(sharding: str, flow: str, pipeline: str, kind: str) -> None:
    answers = ranks(2).run(trained, sharding, flow, pipeline, kind, (0, 3, 6))
    expected = without_refusals(sharding, flow, kind)
    assert [answer["reasons"] for answer in expected] == [[], []]
    assert [answer["reasons"] for answer in answers] == [["refused_on_another_rank"] * 3, ["id_out_of_range"] * 3]
    assert (sum(answer["evicted"] for answer in answers) > 0) == (kind != "plain")
    for mine, theirs in zip(answers, expected, strict=True):
        assert mine["left"].keys() == theirs["left"].keys()
        for name, value in theirs["left"].items():
            assert torch.equal(mine["left"][name], value), name
        for one, two in zip(mine["pooled"], theirs["pooled"], strict=True):
            assert torch.equal(one, two)


def left_by_one_rank(rank: int, world_size: int) -> list[torch.Tensor]:
    """Rank 0's own code fails between both collections, and its caller goes on; so do both, once they are told."""
    model = make(world_size, "data_parallel", "convert", "evict")

    def fail(*_: Any) -> None:
        raise ValueError("not this one")

    for number in range(12):
        if number == 9:
            if rank == 0:
                hook = model.second.register_forward_pre_hook(fail)
                with pytest.raises(ValueError, match="not this one"):
                    model(pair(number, rank))
                hook.remove()
            with pytest.raises(OutOfStepError, match="ranks_at_different_calls"):
                model(pair(number, rank))
        else:
            model(pair(number, rank))[0].backward()
    index = model.first.index("a")
    return [*index.items(), index.row_scores, model.first.weight("a").detach(), torch.tensor(index.counts.tolist())]


def test_replicas_stay_equal_when_one_rank_leaves_a_forward_by_itself() -> None:
    """What both ranks have done together stays on both: the one that left undoes nothing, so the other must not."""
    for mine, theirs in zip(*ranks(2).run(left_by_one_rank), strict=True):
        assert torch.equal(mine, theirs)


def converted_one_by_one(rank: int, world_size: int) -> bool:
    """Whether a batch that the second collection refuses leaves no trace in the first."""
    torch.manual_seed(0)
    model = Two()
    attach([*model.first.parameters(), *model.second.parameters()], "adagrad")
    model.first = recfx.convert(model.first, hashing=LRU)
    model.second = recfx.convert(model.second, hashing={"c": LRU, "s": None})
    parallel = DistributedModelParallel(model, device=CPU)
    parallel(pair(0, rank))[0].backward()
    before = what_is_left(parallel)
    with pytest.raises(InputError):
        parallel(pair(1, rank, fits=False))
    after = what_is_left(parallel)
    return all(torch.equal(after[name], value) for name, value in before.items())


def test_parts_that_were_converted_one_by_one_are_one_model_to_model_parallel() -> None:
    assert ranks(1).run(converted_one_by_one) == [True]
