"""``recfx.TrainPipeline``: what ends it, what goes wrong, and how it goes on."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.sharding.shard import shard_collection
from recfx.pipeline.train_pipeline import Agreement, Held
from tests.sharding.cases import Case, Model, Table, as_sequence, build, plan_of
from tests.sharding.pipelined import CPU, PIPELINES, batches_of_rank, collections, dense_optimizer, sharded_model
from tests.sharding.pipelined import what_is_left as _what_is_left
from tests.sharding.ranks import on_ranks, ranks

HASHED = recfx.HashConfig(dense_rows=0, rows=24, buckets=2)
TABLES = (
    Table("a", 11, 8, ("f0",), "SUM", ("data_parallel",)),
    Table("b", 13, 8, ("f1", "f0"), "MEAN", ("data_parallel",)),
)
FILLS_UP = Case(TABLES, hashing=HASHED, raw_ids=60, sizes=(1,))
FITS = Case(TABLES, hashing=HASHED, raw_ids=8)
SENT = Case(
    (Table("a", 11, 8, ("f0",), "SUM", ("table_wise", 0)), Table("b", 13, 8, ("f1", "f0"), "MEAN", ("row_wise",)))
)
FOURTH_REFUSED = [False] * 3 + [True] + [False] * 2 + [True] * 2
"""Which of six steps, and of two ends of data, give a text."""


def run(model: nn.Module, driver: Any, source: Iterator[Any], again: Iterator[Any] | None = None) -> dict[str, Any]:
    """Step until the batches end, and then through ``again``; errors are part of the answer."""
    answers: list[Any] = []
    for iterator in (source, again or iter([])):
        while True:
            try:
                answers.append(driver.progress(iterator))
            except StopIteration:
                answers.append("end")
                break
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")
    return {"answers": answers, "left": _what_is_left(model)}


def assert_equal(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, other in zip(actual, expected, strict=True):
        assert len(mine["answers"]) == len(other["answers"])
        for one, two in zip(mine["answers"], other["answers"], strict=True):
            assert one == two if isinstance(one, str) else torch.equal(one, two)
        torch.testing.assert_close(mine["left"], other["left"], rtol=0, atol=0)


def made(case: Case, rank: int, world_size: int, pipeline: str, steps: int = 6) -> tuple[nn.Module, Any, list[Any]]:
    model = sharded_model(case, world_size, "alone")
    driver = PIPELINES[pipeline](model, dense_optimizer(case, model), CPU)
    return model, driver, batches_of_rank(case, rank, world_size, steps, "alone")


# What ends, and what follows


def two_iterators(rank: int, world_size: int, pipeline: str, case: Case = FITS) -> dict[str, Any]:
    model, driver, mine = made(case, rank, world_size, pipeline)
    return run(model, driver, iter(mine[:4]), iter(mine[4:]))


def a_loader_that_fails(
    rank: int, world_size: int, pipeline: str, at: int = 3, on: tuple[int, ...] = (0, 1)
) -> dict[str, Any]:
    """Once, on these ranks, before it gives so many batches and the rest of six."""
    model, driver, mine = made(FITS, rank, world_size, pipeline)

    class Loader:
        asked, left = 0, mine[::-1]

        def __next__(self) -> Any:
            self.asked += 1
            if rank in on and self.asked == at + 1:
                raise OSError("the disk is gone")
            if not self.left:
                raise StopIteration
            return self.left.pop()

    return run(model, driver, Loader())  # type: ignore[arg-type]


def no_batches(rank: int, world_size: int, pipeline: str) -> dict[str, Any]:
    model, driver, mine = made(FITS, rank, world_size, pipeline)
    return run(model, driver, iter([]), iter(mine[:1]))


# What goes wrong


def a_table_that_fills_up(rank: int, world_size: int, pipeline: str, case: Case = FILLS_UP) -> dict[str, Any]:
    model, driver, mine = made(case, rank, world_size, pipeline)
    answer = run(model, driver, iter(mine), iter(mine[:2]))
    errors = [outcome.split(":")[0] for outcome in answer["answers"] if isinstance(outcome, str) and outcome != "end"]
    assert errors == ["TableFullError"] + ["OutOfStepError"] * (len(errors) - 1)
    assert not isinstance(answer["answers"][1], str)  # by then calls are made ahead
    return answer


def a_batch_that_lacks_a_feature(rank: int, world_size: int, pipeline: str, case: Case = FITS) -> dict[str, Any]:
    model, driver, mine = made(case, rank, world_size, pipeline)
    mine[3] = KeyedJaggedTensor(["f0"], torch.tensor([5]), lengths=torch.tensor([1, 0, 0]))
    answer = run(model, driver, iter(mine))
    assert [isinstance(outcome, str) for outcome in answer["answers"]] == FOURTH_REFUSED
    return answer


def batches_that_lack_a_feature_on_one_rank(
    rank: int, world_size: int, pipeline: str, wrong: tuple[int, ...]
) -> dict[str, Any]:
    """Both ranks refuse them, and go on with the others."""
    model, driver, mine = made(SENT, rank, world_size, pipeline, steps=7)
    if rank == 0:
        for step in wrong:
            mine[step] = KeyedJaggedTensor(["f0"], torch.tensor([5]), lengths=torch.tensor([1, 0, 0]))
    answer = run(model, driver, iter(mine))
    errors = [outcome.split("]")[0] if isinstance(outcome, str) else "" for outcome in answer["answers"][:-2]]
    said = "MissingFeatureError: [missing_feature" if rank == 0 else "InputError: [refused_on_another_rank"
    assert errors == [said if step in wrong else "" for step in range(7)]
    return answer


class Two(nn.Module):
    """Two collections, both called with parts of the batch."""

    def __init__(self, first: nn.Module, second: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.second, self.over = first, second, nn.Linear(2 * width, 3)

    def forward(self, batch: dict[str, KeyedJaggedTensor]) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([self.first(batch["first"]).values(), self.second(batch["second"]).values()], 1)
        return (self.over(both).tanh() ** 2).mean(), both.detach()


def two_made(
    kind: type[Two], case: Case, rank: int, world_size: int, pipeline: str
) -> tuple[nn.Module, Any, list[dict[str, Any]]]:
    first, second = made(case, rank, world_size, pipeline)[0], made(case, rank, world_size, pipeline)[0]
    model = kind(first.sparse, second.sparse, first.over.module.in_features)
    mine: list[dict[str, Any]] = [
        {"first": ids, "second": KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths())}
        for ids in batches_of_rank(case, rank, world_size, 6, "alone")
    ]
    return model, PIPELINES[pipeline](model, dense_optimizer(case, model), CPU), mine


def a_batch_that_lacks_a_part_on_one_rank(
    rank: int, world_size: int, pipeline: str, part: str, how: str
) -> dict[str, Any]:
    model, driver, mine = two_made(Two, SENT, rank, world_size, pipeline)
    if rank == 0 and how == "gone":
        del mine[3][part]
    if rank == 0 and how == "wrong":
        mine[3][part] = torch.zeros(3)
    answers = run(model, driver, iter(mine))["answers"]
    assert [isinstance(answer, str) for answer in answers] == FOURTH_REFUSED
    return {"said": answers[3] if rank else "", "right": [answer for answer in answers if not isinstance(answer, str)]}


@pytest.mark.parametrize("part", ["first", "second"])
def test_a_batch_that_one_collection_of_one_rank_refuses(part: str) -> None:
    expected = ranks(2).run(a_batch_that_lacks_a_part_on_one_rank, "loop", part, "wrong")
    actual = ranks(2).run(a_batch_that_lacks_a_part_on_one_rank, "recfx", part, "wrong")
    for mine, other in zip(actual, expected, strict=True):
        assert mine["said"] == other["said"]
        assert all(torch.equal(one, two) for one, two in zip(mine["right"], other["right"], strict=True))


class StandsIn(Two):
    """Makes a part without ids where a batch has none."""

    def forward(self, batch: dict[str, KeyedJaggedTensor]) -> tuple[torch.Tensor, torch.Tensor]:
        other = batch["second"]
        none = KeyedJaggedTensor(other.keys(), other.values()[:0], lengths=torch.zeros_like(other.lengths()))
        return super().forward({"first": none, **batch})


def a_batch_without_a_part(
    rank: int, world_size: int, pipeline: str, case: Case, lacking: tuple[int, ...]
) -> dict[str, Any]:
    model, driver, mine = two_made(StandsIn, case, rank, world_size, pipeline)
    if rank in lacking:
        del mine[3]["first"]
    return run(model, driver, iter(mine))


@pytest.mark.parametrize("case", [SENT, FITS])
def test_a_model_that_stands_in_for_a_part_on_one_rank(case: Case) -> None:
    """Its ids were asked for before the model could make them, so all ranks refuse that batch, and it alone."""
    here, there = ranks(2).run(a_batch_without_a_part, "recfx", case, (0,))
    for answer, reason in ((here, "part_not_in_batch"), (there, "refused_on_another_rank")):
        assert [isinstance(outcome, str) for outcome in answer["answers"]] == FOURTH_REFUSED
        assert answer["answers"][3].startswith(f"InputError: [{reason}]")


def a_first_batch_without_a_part(
    rank: int, world_size: int, pipeline: str, case: Case, gives_loss: bool = True
) -> dict[str, Any]:
    """Rank 0's first batch, for which the model makes the part. ``gives_loss``: whether that step gives a loss."""
    model, driver, mine = two_made(StandsIn, case, rank, world_size, pipeline)
    if rank == 0:
        del mine[0]["first"]
    if not gives_loss:
        steps = iter(range(100))
        model.register_forward_hook(lambda _, __, result: result if next(steps) else result[:1])
    answer = run(model, driver, iter(mine))
    if pipeline == "recfx":
        reasons = {call.path: call.why.code if call.why else "" for call in driver.report()}
        assert reasons == {"first": "not_ahead_on_another_rank" if rank else "input_not_in_batch", "second": ""}
    return answer


@pytest.mark.parametrize("case", [SENT, FITS])
def test_a_part_that_the_first_batch_of_one_rank_lacks(case: Case) -> None:
    """All ranks keep the collection out: if some sent its ids ahead, the others would take them for something else."""
    expected = ranks(2).run(a_first_batch_without_a_part, "loop", case)
    assert not any(isinstance(outcome, str) for outcome in expected[0]["answers"][:6])
    assert_equal(ranks(2).run(a_first_batch_without_a_part, "recfx", case), expected)


def a_model_that_fails(
    rank: int, world_size: int, pipeline: str, steps: tuple[int, ...], after: bool
) -> dict[str, Any]:
    model, driver, mine = made(FITS, rank, world_size, pipeline)
    calls = iter(range(100))

    def fail(*_: Any) -> None:
        if next(calls) in steps:
            raise ValueError("not this one")

    (model.over.register_forward_hook if after else model.register_forward_pre_hook)(fail)
    return run(model, driver, iter(mine))


def a_backward_that_fails(rank: int, world_size: int, pipeline: str) -> dict[str, Any]:
    model, driver, mine = made(FITS, rank, world_size, pipeline)
    calls = iter(range(100))

    def fail(gradient: torch.Tensor) -> None:
        if next(calls) == 2:
            raise ValueError("not this one")

    def watch(_: nn.Module, inputs: Any, output: Any) -> None:
        output[0].register_hook(fail)

    model.register_forward_hook(watch)
    return run(model, driver, iter(mine))


class Computed(Model):
    """Its collection's input is made in the model."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(features.permute([2, 1, 0]))


class Turning(Model):
    """From the third call on, its collection is called otherwise, so late that other ranks are the first to give up."""

    calls = 0

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        if self.calls == 3:
            time.sleep(0.5)
        return super().forward(features.permute([0, 1, 2]) if self.calls > 2 else features)


class Changing(Model):
    """It changes its batch in place, from call ``since`` on."""

    calls, since = 0, 0

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        if self.calls >= self.since:
            features.values().remainder_(5)
            lengths = features.lengths()
            lengths.copy_(lengths.flip(0))
        return super().forward(features)


class ChangingLate(Changing):
    since = 3


class Late(Model):
    """Its collection is called from the second batch on."""

    calls = 0

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        if self.calls > 1:
            return super().forward(features)
        pooled = torch.ones(1, next(self.over.parameters()).shape[1])
        return (self.over(pooled).tanh() ** 2).mean(), pooled


def another_model(rank: int, world_size: int, pipeline: str, kind: type[nn.Module], reason: str) -> dict[str, Any]:
    model, driver, mine = made(FITS, rank, world_size, pipeline)
    model.__class__ = kind
    answer = run(model, driver, iter(mine))
    if pipeline == "recfx":
        (call,) = driver.report()
        assert (call.path, call.pipelined, call.why.code, call.why.path) == ("sparse", False, reason, "sparse")
        assert call.why.message
    return answer


@pytest.mark.parametrize(
    ("scenario", "arguments"),
    [
        (two_iterators, ()),
        (a_loader_that_fails, ()),
        (no_batches, ()),
        (a_table_that_fills_up, ()),
        (a_batch_that_lacks_a_feature, ()),
        (two_iterators, (as_sequence(FITS),)),
        (a_table_that_fills_up, (as_sequence(FILLS_UP),)),
        (a_batch_that_lacks_a_feature, (as_sequence(FITS),)),
        (batches_that_lack_a_feature_on_one_rank, ((2, 3),)),
        (batches_that_lack_a_feature_on_one_rank, ((0, 6),)),
        (batches_that_lack_a_feature_on_one_rank, ((1, 2, 3, 4, 5),)),
        (a_model_that_fails, ((2,), False)),
        (a_model_that_fails, ((2,), True)),
        (a_model_that_fails, ((0, 1, 3), True)),
        (a_model_that_fails, ((5,), False)),
        (a_backward_that_fails, ()),
        (another_model, (Computed, "input_not_in_batch")),
        (another_model, (Turning, "input_changed")),
        (another_model, (Late, "not_called")),
        (another_model, (Changing, "input_not_in_batch")),
    ],
)
def test_it_is_as_without_a_pipeline(scenario: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    expected = ranks(2).run(scenario, "loop", *arguments)
    assert_equal(ranks(2).run(scenario, "recfx", *arguments), expected)


# Data that ends, or fails, on some ranks only


def data_of_two_lengths(
    rank: int, world_size: int, pipeline: str, case: Case, lengths: tuple[int, ...], again: bool = False
) -> dict[str, Any]:
    """Rank by rank so many batches; ``again``: and, on all ranks, two more from another iterator."""
    model, driver, mine = made(case, rank, world_size, pipeline, steps=8)
    answers: list[Any] = []
    for iterator in (iter(mine[: lengths[rank]]), iter(mine[6:] if again else [])):
        while True:
            try:
                answers.append(driver.progress(iterator))
            except StopIteration:
                answers.append("end")
                break
            except recfx.OutOfStepError as error:
                answers.append(str(error))
                with pytest.raises(recfx.OutOfStepError, match="data_ended"):
                    driver.progress(iterator)
                break
    return {"answers": answers, "left": _what_is_left(model)}


COUNTED = Case(TABLES, hashing=recfx.HashConfig(dense_rows=0, rows=24, on_full="evict", admit_after=2), raw_ids=40)
LENGTHS = [(0, 1), (1, 0), (1, 2), (2, 1), (5, 2), (3, 4), (4, 3), (6, 3)]


@pytest.mark.parametrize(
    ("case", "lengths"),
    [
        *(((FITS, SENT, COUNTED)[number % 3], lengths) for number, lengths in enumerate(LENGTHS)),
        *((case, lengths) for case, lengths in [(SENT, (5, 2)), (COUNTED, (3, 4)), (FITS, (4, 3))]),
        *((as_sequence(case), lengths) for case, lengths in [(SENT, (5, 2)), (COUNTED, (3, 4)), (FITS, (0, 1))]),
    ],
)
def test_data_of_two_lengths_trains_what_both_ranks_have_and_ends_with_one_error(
    lengths: tuple[int, int], case: Case
) -> None:
    both = min(lengths)
    expected = ranks(2).run(data_of_two_lengths, "loop", case, (both, both), True)
    answers = ranks(2).run(data_of_two_lengths, "recfx", case, lengths, True)
    errors = {answer["answers"][both] for answer in answers}
    assert len(errors) == 1
    assert f"the data of rank {lengths.index(both)} ended after {both} batches" in errors.pop()
    for answer in (*answers, *expected):
        answer["answers"][both] = "over"
    assert_equal(answers, expected)


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_a_loader_that_fails_on_one_rank_costs_no_batch(at: int) -> None:
    expected = ranks(2).run(data_of_two_lengths, "loop", FITS, (6, 6))
    answers = ranks(2).run(a_loader_that_fails, "recfx", at, (1,))
    errors = [answer["answers"].pop(at) for answer in answers]
    assert "[data_failed_on_another_rank] the iterator of rank 1 failed" in errors[0]
    assert errors[1] == "OSError: the disk is gone"
    assert_equal(answers, expected)


# What one rank's own code raises in the middle of a step


def in_a_group_that_waits_two_seconds(case: Case, world_size: int, training: bool) -> tuple[nn.Module, Any]:
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = Model(*build(case))
    converted = recfx.convert(model.sparse, hashing=case.hashing)
    plan = plan_of(case, converted, world_size)
    model.sparse = shard_collection(converted, plan, ShardingEnv.from_process_group(group))
    model.train(training)
    return model, PIPELINES["recfx"](model, dense_optimizer(case, model), CPU)


def own_code_fails_on_one_rank(rank: int, world_size: int, case: Case, where: str, training: bool) -> list[str]:
    """Rank 1's code raises in its third step, and its caller goes on."""
    model, driver = in_a_group_that_waits_two_seconds(case, world_size, training)
    source, calls = iter(batches_of_rank(case, rank, world_size, 6, "alone")), iter(range(100))

    def fail(*_: Any) -> None:
        if rank == 1 and next(calls) == 2:
            raise ValueError("not this one")

    {"before": model.register_forward_pre_hook, "after": model.register_forward_hook}[where](fail)
    return [step.split(":")[0] for step in six_steps(driver, source)]


def six_steps(driver: Any, source: Iterator[Any]) -> list[str]:
    answers = []
    for _ in range(6):
        try:
            driver.progress(source)
            answers.append("")
        except (RuntimeError, ValueError, recfx.RecfxError) as error:
            answers.append(f"{type(error).__name__}: {error}")
    return answers


@pytest.mark.parametrize("is_pooled", [True, False])
@pytest.mark.parametrize(
    ("kind", "where", "training"),
    [("row_wise", "before", True), ("table_wise", "after", True), ("table_wise", "before", False)],
)
def test_own_code_that_fails_on_one_rank_ends_both_in_the_same_step(
    kind: str, where: str, training: bool, is_pooled: bool
) -> None:
    """The pooled rows of the next step are not taken for gradients, or for pooled rows, of this one."""
    case = Case((Table("a", 11, 8, ("f0",), "SUM", (kind, 0)[: 1 + (kind == "table_wise")]),))
    case = case if is_pooled else as_sequence(case)
    errors = ranks(2).run(own_code_fails_on_one_rank, case, where, training)
    assert errors[0][:3] == ["", "", "OutOfStepError"]  # the group's timeout is over
    assert errors[1][:4] == ["", "", "ValueError", "OutOfStepError"]
    assert "" not in errors[0][3:] + errors[1][4:]


@pytest.mark.parametrize(("training", "reason"), [(True, "rank_lost"), (False, "ranks_at_different_calls")])
@on_ranks(2)
def test_a_collection_that_one_rank_alone_keeps_out_while_its_next_batch_was_sent(
    rank: int, world_size: int, training: bool, reason: str
) -> None:
    """Its sizes are not taken for the ids of the next batch. In training, the others wait for it in their backward."""
    model, driver = in_a_group_that_waits_two_seconds(FITS, world_size, training)
    model.__class__ = Turning if rank == 0 else Model  # from the third step on, rank 0 calls it with what it computes
    answers = six_steps(driver, iter(batches_of_rank(FITS, rank, world_size, 6, "alone")))
    assert answers[:2] == ["", ""]
    first = next(answer for answer in answers if answer)
    assert first.startswith(f"OutOfStepError: [{reason}]")
    assert "" not in answers[4:]


def changed_batches(rank: int, world_size: int, by: str) -> list[str]:
    """From the third batch on, by the model; or each, by the loader, which fills one buffer again."""
    model, driver, mine = made(SENT, rank, world_size, "recfx")
    if by == "model":
        model.__class__ = ChangingLate
        return six_steps(driver, iter(mine))
    keys = mine[0].keys()
    mode = torch.inference_mode if by == "loader of inference" else nullcontext
    with mode():
        buffer = torch.empty(2 * len(keys), dtype=torch.int64)

    def loader() -> Iterator[KeyedJaggedTensor]:
        for number in range(6):
            with mode():
                buffer.fill_(number)
            yield KeyedJaggedTensor(keys, buffer, lengths=torch.ones(2 * len(keys), dtype=torch.int64))

    return six_steps(driver, loader())


@pytest.mark.parametrize(("by", "right"), [("model", 2), ("loader", 0), ("loader of inference", 0)])
def test_a_batch_that_is_changed_in_place_after_it_was_loaded(by: str, right: int) -> None:
    for answers in ranks(2).run(changed_batches, by):
        assert answers[:right] == [""] * right
        assert all(answer.startswith("InputError: [batch_changed]") for answer in answers[right:4])


def test_own_code_that_fails_on_one_rank_behind_all_messages_of_a_step_costs_that_batch() -> None:
    case = Case((Table("a", 11, 8, ("f0",), "SUM", ("row_wise",)),))
    assert ranks(2).run(own_code_fails_on_one_rank, case, "after", False) == [
        [""] * 6,
        ["", "", "ValueError", "", "", ""],
    ]


def test_ranks_meet_once_after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before each of the steps that follow as well."""
    model, steps, met = nn.Linear(2, 1), iter(range(100)), list[int]()

    def fail(_: nn.Module, inputs: Any, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if (step := next(steps)) == 1:
            raise ValueError("not this one")
        return output.mean(), torch.tensor(step)

    model.register_forward_hook(fail)
    driver = recfx.TrainPipeline(model, torch.optim.SGD(model.parameters()), "cpu")
    exchange = Agreement.exchange

    def noted(agreement: Agreement, mine: Held, *place: str) -> list[Held]:
        met.extend([1] * bool(place))  # which is that after an error: no rank is asked about the first batch here
        return exchange(agreement, mine, *place)

    monkeypatch.setattr(Agreement, "exchange", noted)
    source = iter(torch.ones(5, 3, 2))
    assert driver.progress(source) == 0
    with pytest.raises(ValueError, match="not this one"):
        driver.progress(source)
    assert [int(driver.progress(source)) for _ in range(3)] == [2, 3, 4]
    assert met == [1]


# What is left behind


def _running() -> int:
    gc.collect()  # those of other tests' pipelines
    return sum(thread.name == "recfx-pipeline" for thread in threading.enumerate())


@on_ranks(2)
def test_its_thread_ends_with_it(rank: int, world_size: int) -> None:
    """So many of the pipeline's threads run before it is gone, and after."""
    model, driver, mine = made(FITS, rank, world_size, "recfx")
    run(model, driver, iter(mine))
    del driver
    gc.collect()
    deadline = time.monotonic() + 5
    while _running() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all("forward" not in collection.__dict__ for collection in collections(model))
    assert _running() == 0


# What is refused


def test_a_model_without_a_loss_is_refused() -> None:
    model = nn.Linear(2, 1)
    pipeline = recfx.TrainPipeline(model, torch.optim.SGD(model.parameters()), "cpu")
    with pytest.raises(recfx.ConversionError, match="no_loss_and_output"):
        pipeline.progress(iter([torch.ones(3, 2)]))


def test_two_dimensional_parallelism_is_refused() -> None:
    model = DMPCollection.__new__(DMPCollection)
    with pytest.raises(recfx.ConversionError, match="two_dimensional_parallelism"):
        recfx.TrainPipeline(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]), "cpu")
