"""TorchRec's own pipelines over sharded collections: the same bits as step by step, and really pipelined."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline.train_pipelines import EvalPipelineSparseDist

import recfx
from tests.sharding.cases import Case, check, train_whole
from tests.sharding.pipelined import (
    CPU,
    PIPELINES,
    assert_same,
    batches_of_rank,
    dense_optimizer,
    sharded_model,
    train,
    what_is_left,
)
from tests.sharding.ranks import ranks
from tests.sharding.typical_cases import CASES as POOLED_CASES
from tests.sharding.typical_cases import SEQUENCES
from tests.support.needs import Missing, needed

TrainPipelineSparseDistLite = needed(
    "torchrec.distributed.train_pipeline.train_pipelines.TrainPipelineSparseDistLite", "TorchRec 1.6"
)
CASES = {**POOLED_CASES, **SEQUENCES}
IN_ONE = [name for name in CASES if not CASES[name].beside]


@functools.cache
def in_a_loop(name: str, form: str, modes: str = "ttttt") -> list[dict[str, Any]]:
    """What step by step is left on each rank."""
    return ranks(2).run(train, CASES[name], "loop", form, modes)


@pytest.mark.parametrize(
    ("name", "form"), [(name, ("alone", "wrapped")[number % 2]) for number, name in enumerate(IN_ONE)]
)
def test_the_sparse_dist_pipeline_changes_no_bit(name: str, form: str) -> None:
    case, expected = CASES[name], in_a_loop(name, form)
    pipelined = ranks(2).run(train, case, "sparse_dist", form)
    assert [answer["forwards"] for answer in pipelined] == [["PipelinedForward"]] * 2
    assert [answer["reported"] for answer in expected + pipelined] == [[False]] * 2 + [[True]] * 2
    assert_same(pipelined, expected)
    unsharded = train_whole(case, 2, 5)[0] if case.hashing else None
    check(case, 2, pipelined, rtol=1e-4, atol=1e-5, expected=unsharded)


@pytest.mark.parametrize(
    ("name", "form", "modes"),
    [
        ("mixed", "two", "ttette"),
        ("hashed_table_wise", "two", "ttette"),
        ("evicting", "two", "ttette"),
        ("admitting", "alone", "ttette"),
        ("mixed", "alone", "e"),
        ("admitting", "two", "e"),
        ("both", "two", "ttette"),
        ("both_evicting", "two", "ttette"),
        ("sequence_admitting", "alone", "e"),
    ],
)
def test_collections_that_share_features_and_steps_in_eval_mode(name: str, form: str, modes: str) -> None:
    expected = in_a_loop(name, form, modes)
    pipelined = ranks(2).run(train, CASES[name], "sparse_dist", form, modes)
    assert {kind for answer in pipelined for kind in answer["forwards"]} == {"PipelinedForward"}
    assert_same(pipelined, expected)


@pytest.mark.parametrize("name", ["mixed", "hashed_row_wise", "sequence", "sequence_row_wise"])
def test_the_base_pipeline_changes_no_bit(name: str) -> None:
    assert_same(ranks(2).run(train, CASES[name], "base"), in_a_loop(name, "alone"))


# Data that ends on some ranks only


def train_to_the_end(
    rank: int, world_size: int, case: Case, pipeline: str, form: str, lengths: tuple[int, ...]
) -> dict[str, Any]:
    """Rank by rank so many batches, until something is raised."""
    model = sharded_model(case, world_size, form)
    driver = PIPELINES[pipeline](model, dense_optimizer(case, model), CPU)
    mine = batches_of_rank(case, rank, world_size, max(lengths), form)
    source, pooled = iter(mine[: lengths[rank]]), []
    left = what_is_left(model)
    while True:
        try:
            pooled.append(driver.progress(source))
            left = what_is_left(model)
        except (StopIteration, recfx.OutOfStepError) as error:
            return {"pooled": pooled, "left": left, "error": str(error)}


@pytest.mark.parametrize(
    ("name", "form", "lengths"),
    [
        ("mixed", "alone", (5, 3)),
        ("mixed", "wrapped", (1, 3)),
        ("hashed_table_wise", "two", (1, 3)),
        ("hashed_table_wise", "alone", (3, 4)),
        ("evicting", "wrapped", (5, 3)),
        ("evicting", "two", (3, 4)),
        ("sequence", "alone", (3, 4)),
        ("both_evicting", "two", (5, 3)),
    ],
)
def test_data_of_two_lengths_trains_what_both_ranks_have(name: str, form: str, lengths: tuple[int, int]) -> None:
    both, longer = min(lengths), lengths.index(max(lengths))
    expected = ranks(2).run(train_to_the_end, CASES[name], "loop", form, (both, both))
    answers = ranks(2).run(train_to_the_end, CASES[name], "sparse_dist", form, lengths)
    assert_same(answers, expected)
    assert answers[1 - longer]["error"] == ""  # TorchRec's StopIteration
    assert "[data_ended]" in answers[longer]["error"]
    assert f"the data of rank {1 - longer} ended after {both} batches" in answers[longer]["error"]


def test_data_of_four_lengths() -> None:
    lengths = (3, 4, 2, 3)
    expected = ranks(4).run(train_to_the_end, CASES["mixed"], "loop", "alone", (2, 2, 2, 2))
    answers = ranks(4).run(train_to_the_end, CASES["mixed"], "sparse_dist", "alone", lengths)
    assert_same(answers, expected)
    for rank, answer in enumerate(answers):
        assert (answer["error"] == "") == (rank == 2)
        assert rank == 2 or "the data of rank 2 ended after 2 batches" in answer["error"]


def two_epochs(rank: int, world_size: int, pipeline: str) -> dict[str, Any]:
    """Two iterators, one after the other, through one pipeline."""
    case = CASES["hashed_table_wise"]
    model = sharded_model(case, world_size, "alone")
    driver = PIPELINES[pipeline](model, dense_optimizer(case, model), CPU)
    mine = batches_of_rank(case, rank, world_size, 6, "alone")
    pooled = []
    for part in (mine[:3], mine[3:]):
        source = iter(part)
        pooled += [driver.progress(source) for _ in part]
        with pytest.raises(StopIteration):
            driver.progress(source)
        if pipeline == "sparse_dist":
            getattr(driver, "reset", Missing("TrainPipelineSparseDist.reset", "TorchRec 1.4"))()
    return {"pooled": pooled, "left": what_is_left(model)}


@pytest.mark.parametrize("pipeline", ["sparse_dist", "recfx"])
def test_two_epochs_change_no_bit(pipeline: str) -> None:
    assert_same(ranks(2).run(two_epochs, pipeline), ranks(2).run(two_epochs, "loop"))


def short_epochs(rank: int, world_size: int) -> list[str]:
    """Epochs of one batch, each through a pipeline of its own, and one in which this rank may have two."""
    case = CASES["mixed"]
    model = sharded_model(case, world_size, "alone")
    optimizer, ends = dense_optimizer(case, model), []
    for batches in (1, 1, 1, 1, 1 + rank):
        driver = PIPELINES["sparse_dist"](model, optimizer, CPU)
        source = iter(batches_of_rank(case, rank, world_size, batches, "alone"))
        driver.progress(source)
        with pytest.raises((StopIteration, recfx.OutOfStepError)) as ended:
            driver.progress(source)
        driver.detach()
        ends.append(getattr(ended.value, "reason", ""))
    return ends


def test_data_that_ends_after_many_short_epochs() -> None:
    assert ranks(2).run(short_epochs) == [[""] * 5, [""] * 4 + ["data_ended"]]


def given_up(rank: int, world_size: int) -> list[str]:
    """Pipelines that end or are given up in the middle; rank 0 alone keeps them, and what they raised."""
    case = CASES["mixed"]
    model = sharded_model(case, world_size, "alone")
    optimizer, ends, kept = dense_optimizer(case, model), [], []
    for batches, steps in ((4, 1), (2 + rank, 9), (3, 2), (2, 9), (1, 9)):
        driver = PIPELINES["sparse_dist"](model, optimizer, CPU)
        source = iter(batches_of_rank(case, rank, world_size, batches, "alone"))
        ended = None
        try:
            for _ in range(steps):
                driver.progress(source)
        except (StopIteration, recfx.OutOfStepError) as error:
            ended = error
        driver.detach()
        ends.append(f"{getattr(ended, 'reason', '')}")
        if rank == 0:
            kept += [driver, source, ended]
        del driver, source, ended
        gc.collect()
    return ends


def test_pipelines_that_one_rank_keeps_after_they_were_given_up() -> None:
    assert ranks(2).run(given_up) == [[""] * 5, ["", "data_ended", "", "", ""]]


def other_pipeline(rank: int, world_size: int, kind: type[Any], training: bool) -> dict[str, Any]:
    case = CASES["mixed"]
    model = sharded_model(case, world_size, "alone").train(training)
    driver = kind(model, dense_optimizer(case, model), CPU)
    source = iter(batches_of_rank(case, rank, world_size, 4, "alone"))
    with torch.set_grad_enabled(training):
        pooled = [driver.progress(source) for _ in range(4)]
        with pytest.raises(StopIteration):
            driver.progress(source)
    return {"pooled": pooled, "left": what_is_left(model)}


@pytest.mark.parametrize(("kind", "training"), [(TrainPipelineSparseDistLite, True), (EvalPipelineSparseDist, False)])
def test_other_pipelines_change_no_bit(kind: type[Any], training: bool) -> None:
    expected = ranks(2).run(other_pipeline, PIPELINES["loop"], training)
    assert_same(ranks(2).run(other_pipeline, kind, training), expected)
