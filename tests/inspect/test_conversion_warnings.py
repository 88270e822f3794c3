"""What ``convert`` warns of: reasons of level warning, once, at the line that called it."""

import contextlib
import copy
import linecache
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.types import ShardingPlan

import recfx
from recfx import HashConfig, RecfxWarning
from recfx.models.conversion_record import conversion_of
from tests.builders.batches import batch
from tests.builders.models import Block
from tests.builders.plans import plan_of_kinds
from tests.sharding.ranks import ranks
from tests.support.fake_group import fake_group

NO_INDEX = HashConfig(on_full="evict", admit_after=3)


def warned(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [one for one in caught if isinstance(one.message, RecfxWarning)]


@pytest.mark.parametrize("options", [{}, {"inplace": True}, {"whole_graph": True}], ids=str)
def test_settings_that_do_nothing(options: dict[str, Any]) -> None:
    sample = (batch(2),)
    converted: list[nn.Module] = []
    caught = warned(lambda: converted.append(recfx.convert(Block(), sample, hashing=NO_INDEX, **options)))
    assert [one.message.diagnostic.code for one in caught] == ["index_settings_not_used"] * 2
    assert {one.message.diagnostic.path for one in caught} == {f"ebc.embedding_bags.{name}" for name in ("t1", "t2")}
    assert all("recfx.convert(Block(), sample" in linecache.getline(one.filename, one.lineno) for one in caught)
    again = [lambda: recfx.convert(converted[0]), lambda: recfx.convert(copy.deepcopy(converted[0])),
             lambda: recfx.convert(pickle.loads(pickle.dumps(converted[0])))]  # fmt: skip
    assert [warned(call) for call in again] == [[]] * 3
    assert len(warned(lambda: recfx.convert(Block(), hashing=NO_INDEX))) == 2  # another conversion


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_warns(rank: int) -> None:
    with fake_group(rank, 2):
        assert len(warned(lambda: recfx.convert(Block(), hashing=NO_INDEX))) == (2 if rank == 0 else 0)


def as_errors(*arguments: Any, **options: Any) -> RecfxWarning | None:
    """What ``convert`` raises where a filter makes errors of warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecfxWarning)
        try:
            recfx.convert(*arguments, **options)
        except RecfxWarning as warning:
            return warning
    return None


def plan_of(model: Any) -> ShardingPlan:
    """A table for each of two ranks."""
    return plan_of_kinds("ebc", model.ebc, {"t1": table_wise(rank=0), "t2": table_wise(rank=1)}, 2)


@pytest.mark.parametrize("converted_before", [False, True])
@pytest.mark.parametrize("shards", [False, True])
def test_warnings_that_are_errors_leave_the_model_as_it_was(converted_before: bool, shards: bool) -> None:
    with fake_group(0, 2) if shards else contextlib.nullcontext():
        model: nn.Module = Block()
        if converted_before:
            warned(lambda: recfx.convert(model, hashing=NO_INDEX, inplace=True))
            conversion_of(model).warned.clear()
        plan = plan_of(model) if shards else None
        before = dict(model.named_modules()), dict(model.named_parameters()), vars(model).keys()
        raised = as_errors(model, hashing=NO_INDEX, inplace=True, plan=plan)
        after = dict(model.named_modules()), dict(model.named_parameters()), vars(model).keys()
        assert raised is not None
        assert after == before


def on_rank(rank: int, world_size: int) -> tuple[list[tuple[str, str]], Any]:
    model = Block()
    model.ebc.embedding_bags["t2"].weight.data = model.ebc.embedding_bags["t2"].weight.data.double()
    caught = warned(lambda: recfx.convert(model, plan=plan_of(model)))
    raised = as_errors(model, plan=plan_of(model))
    return [(one.message.diagnostic.code, one.message.diagnostic.path) for one in caught], str(raised)


def test_ranks_that_have_different_tables_do_the_same() -> None:
    """Rank 1 has the table that no kernel serves; rank 0 warns of it."""
    fallback = "kernel_fallback", "ebc.embedding_bags.t2"
    (first, raised), (second, its_raised) = ranks(2).run(on_rank)
    assert (first, second) == ([fallback], [])
    assert raised == its_raised
    assert raised.startswith("[kernel_fallback]")


@pytest.mark.parametrize(
    "hashing", [None, HashConfig.raw_ids(), HashConfig.raw_ids(on_full="evict"), HashConfig(rows=99)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_wrong(hashing: HashConfig | None, dtype: torch.dtype) -> None:
    """An optimizer may be attached later, and a model cast."""
    assert warned(lambda: recfx.convert(Block().to(dtype), hashing=hashing)) == []
