"""``recfx.TrainPipeline``: the same bits as steps one by one."""

import time
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

import recfx
from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from recfx.runtime.hash_ids import FoundRows
from recfx.runtime.input_dist import InputDistStart
from tests.builders.collections import tables_named
from tests.sharding.cases import Case, Model, as_sequence, batches, build, with_optimizer
from tests.sharding.pipelined import (
    CPU,
    PIPELINES,
    Batch,
    Two,
    assert_same,
    batches_of_rank,
    collections,
    dense_optimizer,
    sharded_model,
    train,
    what_is_left,
)
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.typical_cases import CASES as STOCK_CASES
from tests.sharding.typical_cases import MIXED, SEQUENCES, hashed_case

CASES = {
    **STOCK_CASES,
    **SEQUENCES,
    "hashed_error": hashed_case("row_wise", "error", sizes=(3, 5)),
    "hashed_share": hashed_case("table_wise", "share", sizes=(3, 5)),
    "hashed_lru": hashed_case("row_wise", "lru"),
    "hashed_lfu_admit": hashed_case("table_wise", "lfu_admit"),
    "hashed_adopted": hashed_case("row_wise", "adopted"),
    "hashed_mixed": Case(
        tuple(replace(table, rows=64) for table in MIXED),
        hashing=recfx.HashConfig(dense_rows=0, buckets=4),
        raw_ids=20,
        optimizer="adagrad",
        sizes=(3, 5),
    ),
}


FORMS = ("alone", "wrapped", "two")


@pytest.mark.parametrize(
    ("name", "form"), [(name, "two" if CASES[name].beside else FORMS[number % 3]) for number, name in enumerate(CASES)]
)
def test_changes_no_bit(name: str, form: str) -> None:
    expected = ranks(2).run(train, CASES[name], "loop", form, "ttttttt")
    assert_same(ranks(2).run(train, CASES[name], "recfx", form, "ttttttt"), expected)


def train_unevenly(rank: int, world_size: int, case: Case, pipeline: str) -> dict[str, Any]:
    """Each step, another rank is slow to begin its backward: the worker is ahead of it there, and behind elsewhere."""
    forward, steps = Model.forward, count()

    def slow(self: Model, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, pooled = forward(self, features)
        if loss.requires_grad:
            delay = 0.05 * ((rank + next(steps)) % world_size)
            loss.register_hook(lambda gradient: time.sleep(delay))
        return loss, pooled

    with mock.patch.object(Model, "forward", slow):
        return train(rank, world_size, case, pipeline)


@pytest.mark.parametrize("world_size", [2, 4])
def test_changes_no_bit_where_the_worker_is_ahead_on_some_ranks(world_size: int) -> None:
    """Ranks without a shard of some tables have nothing to look up for them, and still send in their turn."""
    case = replace(CASES["hashed_mixed"], sizes=(3, 5, 2, 4)[:world_size])
    expected = ranks(world_size).run(train, case, "loop")
    assert_same(ranks(world_size).run(train_unevenly, case, "recfx"), expected)


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        *((name, "ttette") for name in ("mixed", "hashed_error", "hashed_share", "hashed_lfu_admit", "both_evicting")),
        ("mixed", "t"), ("hashed_error", "tt"), ("hashed_share", "t"), ("hashed_lfu_admit", "e"),
    ],
)  # fmt: skip
def test_changes_no_bit_where_steps_in_eval_mode_come_between(name: str, modes: str) -> None:
    expected = ranks(2).run(train, CASES[name], "loop", "two", modes)
    assert_same(ranks(2).run(train, CASES[name], "recfx", "two", modes), expected)


@pytest.mark.parametrize("name", ["mixed", "hashed_error", "hashed_lru", "sequence_row_wise"])
def test_changes_no_bit_on_one_rank(name: str) -> None:
    expected = ranks(1).run(train, CASES[name], "loop")
    assert_same(ranks(1).run(train, CASES[name], "recfx"), expected)


@pytest.mark.parametrize("is_pooled", [True, False])
@pytest.mark.parametrize("converted", [False, True])
def test_a_model_without_sharded_collections_runs_as_well(converted: bool, is_pooled: bool) -> None:
    case, left = CASES["hashed_error"] if converted else CASES["mixed"], []
    case = case if is_pooled else as_sequence(case)
    for pipeline in ("loop", "base", "recfx"):
        standard, width = build(case)
        torch.manual_seed(1)
        sparse = with_optimizer(case, recfx.convert(standard, hashing=case.hashing)) if converted else standard
        model = Model(sparse, width)
        driver = PIPELINES[pipeline](model, dense_optimizer(case, model), CPU)
        source = iter([step[0] for step in batches(case, 1, 4)])
        outputs = [driver.progress(source) for _ in range(4)]
        left.append([*outputs, *(p.detach() for p in model.parameters())])
    assert all(
        torch.equal(mine, other) for pipelined in left[1:] for mine, other in zip(pipelined, left[0], strict=True)
    )
    assert [(call.path, call.why and call.why.code) for call in driver.report()] == (
        [("sparse", "not_sharded")] if converted else []
    )


# What is done between steps


def train_and_interfere(rank: int, world_size: int, case: Case, pipeline: str) -> dict[str, Any]:
    """Between the steps: an evaluation, ids that are erased, a state that is loaded."""
    model = sharded_model(case, world_size, "alone")
    driver = PIPELINES[pipeline](model, dense_optimizer(case, model), CPU)
    mine = batches_of_rank(case, rank, world_size, 8, "alone")
    source, pooled, saved = iter(mine), [], {}
    indexes = dict(collections(model)[0].hash_indexes.items())
    for step in range(8):
        pooled.append(driver.progress(source))
        if step in (2, 5):
            model.eval()
            pooled.append(model(mine[7])[1])
            model.train()
        for name, index in indexes.items():
            if step == 1:
                saved[name] = {key: value.clone() for key, value in index.state_dict().items()}
            if step == 3:
                index.erase(index.items()[0][::2])
            if step == 5:
                index.load_state_dict(saved[name])
    return {"pooled": pooled, "left": what_is_left(model)}


@pytest.mark.parametrize("name", ["hashed_error", "hashed_share", "hashed_lfu_admit", "sequence_row_wise"])
def test_nothing_of_later_batches_is_seen_between_steps(name: str) -> None:
    expected = ranks(2).run(train_and_interfere, CASES[name], "loop")
    assert_same(ranks(2).run(train_and_interfere, CASES[name], "recfx"), expected)


# Whether anything is ahead


def train_and_watch(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """The order of events of four steps."""
    model = sharded_model(case, world_size, "alone")
    events: list[str] = []

    def note(kind: type[nn.Module], method: str, event: str) -> Any:
        original = getattr(kind, method)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return original(self, *args, **kwargs)

        setattr(kind, method, noted)
        return lambda: setattr(kind, method, original)

    undo = [note(InputDistStart, "forward", "send"), note(FoundRows, "are_right", "insert")]
    try:
        pipeline = recfx.TrainPipeline(model, dense_optimizer(case, model), "cpu")
        source = iter(batches_of_rank(case, rank, world_size, 4, "alone"))
        model.register_forward_pre_hook(lambda *_: events.append("forward"))
        report = [pipeline.report()]
        for _ in range(4):
            pipeline.progress(source)
            events.append("step")
        report.append(pipeline.report())
    finally:
        for take_back in undo:
            take_back()
    return {
        "events": " ".join(events),
        "report": [(r.path, r.pipelined, r.why.code if r.why else "") for calls in report for r in calls],
    }


@on_ranks(2)
def test_between_steps_the_worker_has_finished(rank: int, world_size: int) -> None:
    """Whoever changes an index there has it to himself."""
    case = CASES["hashed_error"]
    model, kind = sharded_model(case, world_size, "alone"), ShardedHashEmbeddingBagCollection
    original = kind.prefetcher

    def slow(self: Any, context: Any) -> Any:
        find = original(self, context)

        def late(arrived: Any) -> None:
            time.sleep(0.3)
            find(arrived)

        return late

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "prefetcher", slow)
        pipeline = recfx.TrainPipeline(model, dense_optimizer(case, model), "cpu")
        source, finished = iter(batches_of_rank(case, rank, world_size, 4, "alone")), []
        for _ in range(3):
            pipeline.progress(source)
            calls = [call for batch in pipeline._batches for call in batch.calls or ()]
            finished.append([call._arrived.done() for call in calls if call._arrived is not None])
    assert finished == [[True]] * 3


@pytest.mark.parametrize("name", ["hashed_error", "sequence_row_wise"])
def test_ids_are_sent_and_rows_found_ahead(name: str) -> None:
    for answer in ranks(2).run(train_and_watch, CASES[name]):
        assert answer["events"] == (
            "forward send send step send forward insert step send forward insert step forward insert step"
        )
        assert answer["report"] == [("sparse", False, "no_batch_yet"), ("sparse", True, "")]


def test_where_ids_are_counted_they_are_hashed_in_turn_and_the_report_says_so() -> None:
    for answer in ranks(2).run(train_and_watch, CASES["hashed_lfu_admit"]):
        assert "insert" not in answer["events"]
        assert answer["events"].endswith("send forward step send forward step forward step")
        assert answer["report"][1] == ("sparse", True, "hashed_in_turn")


def not_converted(rank: int, world_size: int) -> list[tuple[str, str]]:
    model = DistributedModelParallel(nn.ModuleDict({"ebc": tables_named("t")}), device=CPU)
    report = recfx.TrainPipeline(model, torch.optim.SGD(model.parameters(), 1.0), "cpu").report()
    return [(call.path, call.why.code) for call in report if call.why is not None]


def test_torchrec_s_own_sharded_modules_are_in_the_report() -> None:
    assert ranks(1).run(not_converted) == [[("ebc", "not_converted")]]


class TurnsFirst(Two):
    """From the second call on, its first collection is called otherwise."""

    calls = 0

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        features = batch.features.permute(list(range(len(batch.features.keys())))) if self.calls > 1 else batch.features
        return self.loss_and_output(features, batch)


@on_ranks(2)
def test_a_collection_that_is_called_otherwise_is_kept_out_alone(rank: int, world_size: int) -> None:
    """It sends its ids when it is called; those of the other one are still sent before the model runs."""
    case = CASES["mixed"]
    model: Any = sharded_model(case, world_size, "two")
    model.__class__ = TurnsFirst
    sends = {id(module): name for name in ("first", "second") for module in getattr(model, name).modules()}
    original, events = InputDistStart.forward, []

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        events.append(sends[id(self)])
        return original(self, *args, **kwargs)

    model.register_forward_pre_hook(lambda *_: events.append("|"))
    driver = recfx.TrainPipeline(model, dense_optimizer(case, model), "cpu")
    source = iter(batches_of_rank(case, rank, world_size, 5, "two"))
    steps: list[str] = []
    with mock.patch.object(InputDistStart, "forward", noted):
        for _ in range(5):
            driver.progress(source)
            steps.append(" ".join(events))
            events.clear()
    assert {call.path: call.pipelined for call in driver.report()} == {"first": False, "second": True}
    assert steps == [
        "| first second first second", "first second | first", "second | first", "second | first", "| first",
    ]  # fmt: skip
