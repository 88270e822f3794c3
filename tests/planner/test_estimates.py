"""What planning computes once: estimates of shards of one size, and what trains a table. The results are the same."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.distributed.planner.utils import reset_shard_rank

import recfx
from recfx.planner import priced_proposals
from recfx.planner.enumerator import OrderedEnumerator
from recfx.planner.plan import planning_sharders
from recfx.replacement.replace_collections import as_converted
from tests.builders.plans import model_of_tables

MODEL = model_of_tables([1001, 50_000, 7 * 8], dim=64)
TOPOLOGY = Topology(8, "cuda", local_world_size=4)


def enumerated(kind: type[EmbeddingEnumerator]) -> list[ShardingOption]:
    sharders = planning_sharders(MODEL, as_converted(MODEL), with_torchrec=False)
    return kind(TOPOLOGY, 512, {}).enumerate(MODEL, sharders)


def name_of(option: ShardingOption) -> tuple[str, str, str]:
    return option.fqn, option.sharding_type, option.compute_kernel


@pytest.mark.parametrize("estimator", [EmbeddingPerfEstimator, EmbeddingStorageEstimator])
def test_shards_of_one_size_are_estimated_once_and_as_torchrec_does(
    monkeypatch: pytest.MonkeyPatch, estimator: Any
) -> None:
    expected = {name_of(option): option for option in enumerated(EmbeddingEnumerator)}
    estimate, estimated = estimator.estimate, []

    def counted(self: Any, options: list[ShardingOption], *rest: Any, **keywords: Any) -> None:
        estimated.extend((*name_of(option), *shard.size) for option in options for shard in option.shards)
        estimate(self, options, *rest, **keywords)

    monkeypatch.setattr(estimator, "estimate", counted)
    options = enumerated(OrderedEnumerator)
    assert set(Counter(estimated).values()) == {1}
    assert len(estimated) < sum(len(option.shards) for option in expected.values()) / 2
    assert {option.sharding_type for option in options} >= {"row_wise", "table_row_wise", "column_wise"}
    for option in options:
        assert list(map(facts_of, option.shards)) == list(map(facts_of, expected[name_of(option)].shards))


def facts_of(shard: Shard) -> tuple[Any, ...]:
    return shard.size, shard.offset, shard.storage, shard.perf


def option_of_type(sharding_type: str) -> ShardingOption:
    return next(option for option in enumerated(OrderedEnumerator) if option.sharding_type == sharding_type)


def test_a_copy_of_a_plan_has_its_own_ranks_and_the_same_estimates() -> None:
    option = option_of_type("table_row_wise")
    shard, copied = option.shards[0], copy.deepcopy(option).shards[0]
    assert copied == shard
    assert copied.perf is shard.perf
    assert copied.storage is shard.storage
    shard.rank = 3
    shard.size[0] = shard.offset[0] = -1
    assert (copied.rank, copied.size[0], copied.offset[0]) == (None, -(-option.tensor.shape[0] // 4), 0)


@pytest.mark.parametrize("sharding_type", ["row_wise", "data_parallel"])
def test_shards_on_all_ranks_have_one_rank_each_and_are_never_copied(sharding_type: str) -> None:
    option = option_of_type(sharding_type)
    reset_shard_rank([option])
    assert [shard.rank for shard in option.shards] == list(range(8))
    assert copy.deepcopy(option).shards is option.shards


def test_what_trains_a_table_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, asked = priced_proposals.planned_facts, []

    def counted(collection: Any, sharding: Any, device: str) -> Any:
        asked.extend((sharded.table.name, sharded.compute_kernel) for sharded in sharding.tables)
        return facts(collection, sharding, device)

    monkeypatch.setattr(priced_proposals, "planned_facts", counted)
    assert recfx.plan(MODEL, TOPOLOGY).pricing.tried > 20
    assert set(Counter(asked).values()) == {1}
