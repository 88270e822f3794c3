"""``recfx.monitor`` on several ranks: each has its own rows, and all can have the sum."""

from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from tests.sharding.cases import (
    Case,
    batches,
    build,
    concatenate,
    deduped,
    model_and_plan,
    model_parallel,
    shard,
    values_of,
    with_optimizer,
)
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.typical_cases import FOUR_LARGER, TYPES, hashed_case

RAW = Case(
    FOUR_LARGER,
    optimizer="rowwise_adagrad",
    hashing=recfx.HashConfig(dense_rows=0, buckets=4, admit_after=2),
    raw_ids=20,
)


def watched(rank: int, world_size: int, wrapped: bool) -> dict[str, Any]:
    model, plan = model_and_plan(RAW, world_size)
    model = model_parallel(model, plan) if wrapped else recfx.convert(model, plan=plan)
    mine, everyones = recfx.monitor(model), recfx.monitor(model)
    for step in batches(RAW, world_size, 3):
        model(step[rank])[0].backward()
    inner = model.module if wrapped else model
    counts = {name: (index.occupancy(), index.counters) for name, index in inner.sparse.hash_indexes.items()}
    return {"mine": mine.scalars(), "all": everyones.scalars(dist.group.WORLD, probe_all=True), "counts": counts}


@pytest.mark.parametrize("wrapped", [False, True])
def test_ranks_have_their_own_rows_and_the_sum_of_all(wrapped: bool) -> None:
    answers = ranks(2).run(watched, wrapped)
    prefix = "sparse.embedding_bags."
    assert answers[0]["all"] == pytest.approx(answers[1]["all"], rel=0, abs=0, nan_ok=True)
    assert {tag.partition("/")[0] for tag in answers[0]["all"]} == {prefix + table.name for table in RAW.tables}
    tables = [{tag.partition("/")[0].removeprefix(prefix) for tag in answer["mine"]} for answer in answers]
    assert tables == [{"rows", "columns", "replicas"}, {"rows", "whole", "columns", "replicas"}]
    for answer in answers:
        occupancy, counters = answer["counts"]["rows"]
        assert answer["mine"][f"{prefix}rows/occupancy"] == occupancy.taken / occupancy.rows
        assert answer["mine"][f"{prefix}rows/insert_rate"] == counters["inserted"] / counters["ids_seen"]
    worst = [answer["mine"][f"{prefix}rows/worst_bucket"] for answer in answers]
    assert answers[0]["all"][f"{prefix}rows/worst_bucket"] == pytest.approx(max(worst))


@on_ranks(2)
def test_the_share_of_different_ids_is_what_is_counted_by_hand(rank: int, world_size: int) -> None:
    case = deduped(Case(FOUR_LARGER))
    sharded = shard(case, build(case)[0], world_size)
    counts: dict[str, list[int]] = {table.name: [0, 0] for table in case.tables}
    for step in batches(case, world_size, 3):
        values_of(sharded(step[rank])).sum().backward()
        for table in case.tables:
            for ids in (step[rank][key].values() for key in table.features):
                counts[table.name][0] += ids.unique().numel()
                counts[table.name][1] += ids.numel()
    sharded.eval()
    sharded(batches(case, world_size, 1)[0][rank]).wait()  # counts nothing
    (described,) = recfx.explain(sharded).collections
    said = {reason.path: reason.message for reason in described.reasons if reason.code == "ids_sent_once"}
    for table, (different, ids) in counts.items():
        assert f"{different / ids:.1%} of {ids:,} ids were different" in said[f"embeddings.{table}"]
    with pytest.raises(recfx.ConversionError, match="no_index"):
        recfx.monitor(sharded)


@pytest.mark.parametrize("kind", ["column_wise", "row_wise"])
@on_ranks(4)
def test_after_a_load_the_interval_begins_with_the_load(rank: int, world_size: int, kind: str, tmp_path: Path) -> None:
    """The sum of all ranks right after the load of a saved state, and after one more step of ids that it has."""
    case = hashed_case(kind, "error", local_size=2, sizes=(3,))
    folder = str(tmp_path / "saved")
    first, *_ = batches(case, world_size, 1)
    sharded = shard(case, build(case)[0], world_size)
    sharded(first[rank]).values().sum().backward()
    sharded(first[rank]).values().sum().backward()
    recfx.save_checkpoint(sharded, folder)
    second = shard(case, build(case)[0], world_size)
    second(first[rank]).values().sum().backward()
    monitor = recfx.monitor(second)
    second(first[rank]).values().sum().backward()
    recfx.load_checkpoint(second, folder)
    told = [monitor.scalars(dist.group.WORLD)]
    second(first[rank]).values().sum().backward()
    told.append(monitor.scalars(dist.group.WORLD))
    second.load_state_dict(sharded.state_dict())
    told.append(monitor.scalars(dist.group.WORLD))
    at_load, after, again = told
    of_intervals = [value for told in (at_load, again) for tag, value in told.items() if tag.endswith("_rate")]
    assert of_intervals
    assert all(map(isnan, of_intervals))
    rates = [value for tag, value in after.items() if tag.endswith("insert_rate")]
    assert rates
    assert set(rates) == {0.0}


_STEPS = 14


def scalars_of_steps(
    collection: nn.Module, steps: list[KeyedJaggedTensor], group: dist.ProcessGroup | None
) -> list[dict[str, float]]:
    """After each step, of which every third is in eval mode; without the probes, which depend on how tables are cut."""
    monitor = recfx.monitor(collection)
    told = []
    for number, step in enumerate(steps):
        collection.train(number % 3 != 2)
        with torch.set_grad_enabled(collection.training):  # a backward that may follow would keep rows from eviction
            pooled = collection(step).values()
        if collection.training:
            pooled.sum().backward()
        scalars = monitor.scalars(group)
        told.append({name: value for name, value in scalars.items() if not name.endswith("longest_probe")})
    return told


def on_all_ranks(rank: int, world_size: int, case: Case) -> list[dict[str, float]]:
    sharded = shard(case, build(case)[0], world_size)
    return scalars_of_steps(sharded, [step[rank] for step in batches(case, world_size, _STEPS)], dist.group.WORLD)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (kind, config)
        for number, kind in enumerate(sorted(TYPES))
        for place, config in enumerate(("lru", "lfu_admit", "share"))
        if number % 3 == place
    ],
)
def test_the_sum_of_all_ranks_is_that_of_the_unsharded_model(kind: str, config: str) -> None:
    case = hashed_case(kind, config, local_size=2, sizes=(4, 0, 1, 2))
    whole = with_optimizer(case, recfx.convert(build(case)[0], hashing=case.hashing))
    expected = scalars_of_steps(whole, [concatenate(step) for step in batches(case, 4, _STEPS)], None)
    rates = {tag.rpartition("/")[2] for told in expected for tag, value in told.items() if value > 0}
    assert (
        rates
        >= {
            "lru": {"insert_rate", "evict_rate", "eval_unseen_rate"},
            "lfu_admit": {"insert_rate", "admit_rate", "unseen_rate", "eval_unseen_rate"},
            "share": {"insert_rate", "shared_rate", "eval_unseen_rate"},
        }[config]
    )
    for told in ranks(4).run(on_all_ranks, case):
        assert [scalars.keys() for scalars in told] == [scalars.keys() for scalars in expected]
        for here, there in zip(told, expected, strict=True):
            assert here == pytest.approx(there, nan_ok=True)
