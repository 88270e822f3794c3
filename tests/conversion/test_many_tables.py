"""What is done once per model grows linearly with its tables. Work is counted, not timed."""

import copy
import functools
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType

import recfx
from tests.builders.collections import table
from tests.builders.optimizers import attach

TABLES = 25

_RECFX = str(Path(recfx.__file__).parent)
_NOT_COUNTED = (str(Path("torch", "nn", "modules", "module.py")), f"{os.sep}sympy{os.sep}")


@functools.cache
def _is_counted(file: str) -> bool:
    return not any(part in file for part in _NOT_COUNTED)


class CountedName(str):
    """A name whose comparisons are calls, and therefore counted: searches in tuples of names show as well."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


def work_of(function: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, and lines run inside recfx, loops in one line included.

    What ``nn.Module.load_state_dict`` does by itself is left out: it looks at all keys for every child module. So is
    sympy, which sorts and caches what it was given before.
    """
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event in ("call", "c_call") and _is_counted(frame.f_code.co_filename):
            count += 1

    def trace_lines(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += 1
        return trace_lines

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        return trace_lines if frame.f_code.co_filename.startswith(_RECFX) else None

    before = sys.gettrace(), sys.getprofile()
    gc.collect()
    gc.disable()  # what it collects may be anybody's, and be told so
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
        gc.enable()
    return count


ADOPTED, RAW = recfx.HashConfig(), recfx.HashConfig(dense_rows=0)


def collection(
    tables: int, pooling: Callable[[int], PoolingType] = lambda _: PoolingType.SUM
) -> EmbeddingBagCollection:
    configs = [
        table(CountedName(f"t{number}"), [CountedName(f"f{number}")], rows=4, dim=4, pooling=pooling(number))
        for number in range(tables)
    ]
    return EmbeddingBagCollection(configs)


def mixed(tables: int) -> EmbeddingBagCollection:
    """SUM and MEAN in turns: two lookups, each of which has to take its keys out of the batch."""
    return collection(tables, lambda number: (PoolingType.SUM, PoolingType.MEAN)[number % 2])


class ManyCollections(nn.Module):
    """Five tables each."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([collection(5) for _ in range(tables // 5)])

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.cat([part(features).values() for part in self.parts], dim=1)


def batch(tables: int) -> KeyedJaggedTensor:
    keys = [f"f{table}" for table in range(tables)]
    return KeyedJaggedTensor(keys, torch.ones(2 * tables, dtype=torch.int64), lengths=torch.ones(2 * tables).long())


Built = tuple[nn.Module, KeyedJaggedTensor]


def one(tables: int) -> Built:
    return collection(tables), batch(tables)


def means(tables: int) -> Built:
    return mixed(tables), batch(tables)


def many(tables: int) -> Built:
    return ManyCollections(tables), batch(5)


def fused(tables: int) -> tuple[nn.Module, KeyedJaggedTensor]:
    model = collection(tables)
    attach(model, torch.optim.Adagrad)
    return model, batch(tables)


def _forward(model: nn.Module, features: KeyedJaggedTensor) -> torch.Tensor:
    pooled = model(features)
    return pooled if isinstance(pooled, torch.Tensor) else pooled.values()


CASES: dict[str, tuple[Callable[[int], Any], Any, Callable[[nn.Module, KeyedJaggedTensor], Any]]] = {
    # What is built, how it is converted before the work is counted (None: not at all), and what is counted.
    "convert hashed": (means, None, lambda model, features: recfx.convert(model, hashing=RAW)),
    "convert with a sample": (many, None, lambda model, features: recfx.convert(model, (features,), verify=False)),
    "explain many": (many, ADOPTED, lambda model, features: recfx.explain(model)),
    "deepcopy": (means, ADOPTED, lambda model, features: copy.deepcopy(model)),
    "load": (many, RAW, lambda model, features: model.load_state_dict(model.state_dict())),
    "first step": (fused, ADOPTED, lambda model, features: _forward(model, features).sum().backward()),
}


def assert_linear(prepared: Callable[[int], Callable[[], Any]]) -> None:
    """What is prepared for a number of tables is counted when it is called."""
    # The first number fills caches and imports what is imported late.
    work = [work_of(prepared(tables)) for tables in (5, TABLES, 2 * TABLES, 3 * TABLES)]
    # Zero where it is linear; twice the square of TABLES where each table looks at each other one once.
    assert work[3] - 2 * work[2] + work[1] < TABLES**2 / 2, work


@pytest.mark.parametrize("case", CASES)
def test_work_grows_linearly(case: str) -> None:
    build, hashing, run = CASES[case]

    def prepared(tables: int) -> Callable[[], Any]:
        model, features = build(tables)
        if hashing is not None:
            model = recfx.convert(model, hashing=hashing)
        return lambda: run(model, features)

    assert_linear(prepared)
