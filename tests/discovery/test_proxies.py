"""Code that asks what a value is gets the answer that it gets for a batch, or the trace fails; nothing is left out."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor, KeyedTensor

import recfx
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.support.refusals import refused

FEATURES = batch(2)


class Reads(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.ebc, self.read = collection(4), read

    def forward(self, features: KeyedJaggedTensor, values: torch.Tensor) -> torch.Tensor:
        pooled = self.ebc(features)
        if isinstance(pooled, KeyedTensor):
            pooled = pooled.values()
        return torch.nan_to_num(pooled + self.read(values), 3.0)


def if_tensor(values: Any) -> Any:
    return values.clamp(max=10) if isinstance(values, torch.Tensor) else values


def if_it_has_lengths(values: Any) -> Any:
    return values if hasattr(values, "lengths") else values.clamp(max=10)


def by_dtype(values: Any) -> Any:
    return values / 100 if values.dtype is torch.float64 else values


def counts_great_values(values: Any) -> Any:
    count = torch.zeros(1)
    count += (values > 10).sum()
    return values + count


def keeps_the_greatest(values: Any) -> Any:
    greatest = torch.zeros(2, 1)
    torch.maximum(greatest, values.max(), out=greatest)
    return values + greatest


def limits_a_copy(values: Any) -> Any:
    return copy.deepcopy(values).clamp_(max=10) + values


def handles_the_error(values: Any) -> Any:
    with contextlib.suppress(Exception):
        if values.isnan().any():
            values = values.nan_to_num(5.0)
    return values


def by_a_number(values: Any) -> Any:
    return values * {7.0: 2.0}.get(values.sum().item(), 1.0)


def by_text(values: Any) -> Any:
    return values * 2 if "7." in str(values.sum()) else values


@torch.jit.script
def width_of(values: torch.Tensor) -> int:
    return values.size(1)


def by_a_scripted_function(values: Any) -> Any:
    return values * width_of(values)


ANSWERED = [if_tensor, if_it_has_lengths, counts_great_values, keeps_the_greatest, limits_a_copy]


@pytest.mark.parametrize("read", ANSWERED)
@pytest.mark.parametrize("whole", [False, True])
def test_code_that_asks_what_a_value_is_takes_the_branch_of_a_batch(read: Any, whole: bool, tmp_path: Path) -> None:
    sample, great = torch.ones(2, 1), torch.full((2, 1), 500.0)
    model = Reads(read).eval()
    if whole:
        answers: Any = recfx.trace(recfx.convert(model), (FEATURES, sample))
    else:
        recfx.export(model, tmp_path / "model", (FEATURES, sample))
        answers = recfx.load(tmp_path / "model")
    for values in (sample, great, sample):
        torch.testing.assert_close(answers(FEATURES, values), model(FEATURES, values))


def test_a_dtype_that_the_code_reads_is_checked(tmp_path: Path) -> None:
    recfx.export(Reads(by_dtype), tmp_path / "model", (FEATURES, torch.ones(2, 1)))
    with refused("wrong_dtype", error=recfx.InputError):
        recfx.load(tmp_path / "model")(FEATURES, torch.ones(2, 1).double())


@pytest.mark.parametrize("read", [handles_the_error, by_a_number, by_text, by_a_scripted_function])
def test_a_trace_in_which_a_proxy_has_no_answer_fails(read: Any, tmp_path: Path) -> None:
    with refused("untraceable_root", error=recfx.ConversionError):
        recfx.trace(recfx.convert(Reads(read)), (FEATURES, torch.ones(2, 1)))
    with refused("not_scriptable", error=recfx.ExportError):
        recfx.export(Reads(read), tmp_path / "model", (FEATURES, torch.ones(2, 1)))
