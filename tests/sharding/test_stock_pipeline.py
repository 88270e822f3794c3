"""TorchRec's own pipelines over sharded collections: the same bits as step by step, and really pipelined."""

import functools
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline.train_pipelines import EvalPipelineSparseDist

from tests.sharding.cases import check, train_whole
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
