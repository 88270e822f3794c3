"""``recfx.TrainPipeline``: what ends it, what goes wrong, and how it goes on."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DMPCollection

import recfx
from tests.sharding.cases import Case, Model, Table
from tests.sharding.pipelined import CPU, PIPELINES, batches_of_rank, collections, dense_optimizer, sharded_model
from tests.sharding.pipelined import what_is_left as _what_is_left
from tests.sharding.ranks import ranks

HASHED = recfx.HashConfig(dense_rows=0, rows=24, buckets=2)
TABLES = (
    Table("a", 11, 8, ("f0",), "SUM", ("data_parallel",)),
    Table("b", 13, 8, ("f1", "f0"), "MEAN", ("data_parallel",)),
)
FILLS_UP = Case(TABLES, hashing=HASHED, raw_ids=60, sizes=(1,))
FITS = Case(TABLES, hashing=HASHED, raw_ids=8)
SENT = Case(
    (
        Table("a", 11, 8, ("f0",), "SUM", ("table_wise", 0)),
        Table("b", 13, 8, ("f1", "f0"), "MEAN", ("row_wise",)),
    )
)


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


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert len(mine["answers"]) == len(other["answers"])
        for one, two in zip(mine["answers"], other["answers"], strict=True):
            assert one == two if isinstance(one, str) else torch.equal(one, two)
        for name, value in mine["left"].items():
            assert torch.equal(value, other["left"][name]), name


def made(case: Case, rank: int, world_size: int, pipeline: str, steps: int = 6) -> tuple[nn.Module, Any, list[Any]]:
    model = sharded_model(case, world_size, "alone")
    driver = PIPELINES[pipeline](model, dense_optimizer(case, model), CPU)
    return model, driver, batches_of_rank(case, rank, world_size, steps, "alone")


# What ends, and what follows


def two_iterators(rank: int, world_size: int, pipeline: str) -> dict[str, Any]:
    model, driver, mine = made(FITS, rank, world_size, pipeline)
    return run(model, driver, iter(mine[:4]), iter(mine[4:]))


def a_loader_that_fails(rank: int, world_size: int, pipeline: str) -> dict[str, Any]:
    model, driver, mine = made(FITS, rank, world_size, pipeline)

    class Loader:
        position = 0

        def __next__(self) -> Any:
            self.position += 1
            if self.position == 4:
                raise OSError("the disk is gone")
            if self.position > 6:
                raise StopIteration
            return mine[self.position - 1]

    return run(model, driver, Loader())  # type: ignore[arg-type]


def no_batches(rank: int, world_size: int, pipeline: str) -> dict[str, Any]:
    model, driver, mine = made(FITS, rank, world_size, pipeline)
    return run(model, driver, iter([]), iter(mine[:1]))


# What goes wrong


def a_table_that_fills_up(rank: int, world_size: int, pipeline: str) -> dict[str, Any]:
    model, driver, mine = made(FILLS_UP, rank, world_size, pipeline)
    answer = run(model, driver, iter(mine), iter(mine[:2]))
    errors = [each.split(":")[0] for each in answer["answers"] if isinstance(each, str) and each != "end"]
    assert errors == ["TableFullError"] + ["OutOfStepError"] * (len(errors) - 1)
    assert not isinstance(answer["answers"][1], str)  # by then calls are made ahead
    return answer


def a_batch_that_lacks_a_feature(rank: int, world_size: int, pipeline: str) -> dict[str, Any]:
    model, driver, mine = made(FITS, rank, world_size, pipeline)
    mine[3] = KeyedJaggedTensor(["f0"], torch.tensor([5]), lengths=torch.tensor([1, 0, 0]))
    answer = run(model, driver, iter(mine))
    assert [isinstance(each, str) for each in answer["answers"]] == [False] * 3 + [True] + [False] * 2 + [True] * 2
    return answer


def batches_that_lack_a_feature_on_one_rank(rank: int, world_size: int, pipeline: str) -> dict[str, Any]:
    """The next ones take their place: pooled rows must not meet ids of the other rank."""
    model, driver, mine = made(SENT, rank, world_size, pipeline, steps=7)
    if rank == 0:
        mine[2:4] = [KeyedJaggedTensor(["f0"], torch.tensor([5]), lengths=torch.tensor([1, 0, 0]))] * 2
    else:
        del mine[5:]
    answer = run(model, driver, iter(mine))
    failed = [isinstance(each, str) for each in answer["answers"][:-2]]
    assert failed == ([False, False, True, True, False, False, False] if rank == 0 else [False] * 5)
    return answer


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
    """From the third call on, its collection is called otherwise."""

    calls = 0

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return super().forward(features.permute([0, 1, 2]) if self.calls > 2 else features)


def another_model(rank: int, world_size: int, pipeline: str, kind: type[nn.Module], reason: str) -> dict[str, Any]:
    model, driver, mine = made(FITS, rank, world_size, pipeline)
    model.__class__ = kind
    answer = run(model, driver, iter(mine))
    if pipeline == "recfx":
        ((path, pipelined, why, message),) = driver.report()
        assert (path, pipelined, why) == ("sparse", False, reason)
        assert message
    return answer


@pytest.mark.parametrize(
    ("scenario", "arguments"),
    [
        (two_iterators, ()),
        (a_loader_that_fails, ()),
        (no_batches, ()),
        (a_table_that_fills_up, ()),
        (a_batch_that_lacks_a_feature, ()),
        (batches_that_lack_a_feature_on_one_rank, ()),
        (a_model_that_fails, ((2,), False)),
        (a_model_that_fails, ((2,), True)),
        (a_model_that_fails, ((0, 1, 3), True)),
        (a_model_that_fails, ((5,), False)),
        (a_backward_that_fails, ()),
        (another_model, (Computed, "input_not_in_batch")),
        (another_model, (Turning, "input_changed")),
    ],
)
def test_it_is_as_without_a_pipeline(scenario: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    expected = ranks(2).run(scenario, "loop", *arguments)
    assert_equal(ranks(2).run(scenario, "recfx", *arguments), expected)


# What is left behind


def threads_left(rank: int, world_size: int) -> tuple[int, int]:
    """So many of the pipeline's threads run before it is gone, and after."""
    model, driver, mine = made(FITS, rank, world_size, "recfx")
    run(model, driver, iter(mine))
    before = _running()
    del driver
    gc.collect()
    deadline = time.monotonic() + 5
    while _running() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all("forward" not in each.__dict__ for each in collections(model))
    return before, _running()


def _running() -> int:
    gc.collect()  # those of other tests' pipelines
    return sum(thread.name == "recfx-pipeline" for thread in threading.enumerate())


def test_its_thread_ends_with_it() -> None:
    for _, after in ranks(2).run(threads_left):
        assert after == 0


# What is refused


def test_a_model_without_a_loss_is_refused() -> None:
    model = nn.Linear(2, 1)
    pipeline = recfx.TrainPipeline(model, torch.optim.SGD(model.parameters()), "cpu")
    with pytest.raises(recfx.ConversionError, match="no_loss_and_output"):
        pipeline.progress(iter([torch.ones(3, 2)]))


def test_two_dimensional_parallelism_is_refused() -> None:
    model = DMPCollection.__new__(DMPCollection)
    with pytest.raises(recfx.ConversionError, match="two_dimensional_parallelism"):
        recfx.TrainPipeline(model, None, "cpu")  # type: ignore[arg-type]
