"""What ``convert`` warns of: reasons of level warning, once, at the line that called it."""

from __future__ import annotations

import copy
import linecache
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx import HashConfig, RecfxWarning
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.models import ZOO
from tests.support.fake_group import fake_group

NO_INDEX = HashConfig(on_full="evict", admit_after=3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()

    def forward(self, features: Any) -> Any:
        return self.ebc(features)


def warned(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [one for one in caught if isinstance(one.message, RecfxWarning)]


@pytest.mark.parametrize("options", [{}, {"inplace": True}, {"whole_graph": True}], ids=str)
def test_settings_that_do_nothing(options: dict[str, Any]) -> None:
    sample = (batch(2),)
    converted: list[nn.Module] = []
    caught = warned(lambda: converted.append(recfx.convert(Model(), sample, hashing=NO_INDEX, **options)))
    assert [one.message.diagnostic.code for one in caught] == ["index_settings_not_used"] * 2
    assert {one.message.diagnostic.path for one in caught} == {f"ebc.embedding_bags.{name}" for name in ("t1", "t2")}
    assert all("recfx.convert(Model(), sample" in linecache.getline(one.filename, one.lineno) for one in caught)
    again = [lambda: recfx.convert(converted[0]), lambda: recfx.convert(copy.deepcopy(converted[0])),
             lambda: recfx.convert(pickle.loads(pickle.dumps(converted[0])))]  # fmt: skip
    assert [warned(call) for call in again] == [[]] * 3
    assert len(warned(lambda: recfx.convert(Model(), hashing=NO_INDEX))) == 2  # another conversion


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_warns(rank: int) -> None:
    with fake_group(rank, 2):
        assert len(warned(lambda: recfx.convert(Model(), hashing=NO_INDEX))) == (2 if rank == 0 else 0)


@pytest.mark.parametrize(
    "hashing", [None, HashConfig.raw_ids(), HashConfig.raw_ids(on_full="evict"), HashConfig(rows=99)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_wrong(hashing: HashConfig | None, dtype: torch.dtype) -> None:
    """An optimizer may be attached later, and a model cast."""
    assert warned(lambda: recfx.convert(Model().to(dtype), hashing=hashing)) == []


def test_nothing_is_wrong_in_the_zoo() -> None:
    with fake_group(0, 1):
        warn = [case.name for case in ZOO if warned(partial(recfx.convert, case.model()))]
    assert warn == []
