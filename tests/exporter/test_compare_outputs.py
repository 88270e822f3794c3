"""The other batches on which a file is compared with its model."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from recfx.exporter.compare_outputs import other_batches
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.support.refusals import refused


class AddsOnesOfFourSamples(nn.Module):
    """Takes batches of four samples, and what can be broadcast to them."""

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        return dense + torch.ones(4, 2)


def test_a_batch_of_one_is_not_compared_where_a_bigger_one_is_refused() -> None:
    """What is added is not of the batch: the answer to one sample has four."""
    model, sample = AddsOnesOfFourSamples(), recfx.Sample(torch.zeros(4, 2))
    names = [name for name, _, _ in other_batches(model, sample)]
    assert names[:2] == ["tensors that are not contiguous", "other values"]


def test_the_batches_that_a_model_takes_are_compared() -> None:
    model, sample = nn.Linear(2, 1), recfx.Sample(torch.zeros(4, 2))
    sizes = {name: len(answer) for name, _, answer in other_batches(model, sample)}
    assert sizes == {
        "a bigger batch": 5,
        "a batch of one": 1,
        "a batch of no samples": 0,
        "tensors that are not contiguous": 4,
        "other values": 4,
        "NaN": 4,
        "infinite values": 4,
        "values of 0": 4,
        "great values": 4,
        "great negative values": 4,
    }


class ReadsMemory(nn.Module):
    """What a careless kernel does."""

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(dense, dense.shape, (2, 1)) * 1.0


def test_a_model_that_reads_memory_itself_is_not_asked_for_strided_tensors() -> None:
    names = [name for name, _, _ in other_batches(ReadsMemory(), recfx.Sample(torch.ones(4, 2)))]
    assert names[:4] == ["a bigger batch", "a batch of one", "a batch of no samples", "other values"]


class LimitsValues(nn.Module):
    """Asks for the class itself, which no trace can answer."""

    def __init__(self, limit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.ebc, self.limit = collection(4), limit

    def forward(self, features: KeyedJaggedTensor, values: torch.Tensor) -> torch.Tensor:
        if type(values) is torch.Tensor:
            values = self.limit(values)
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled + values.sum()


@pytest.mark.parametrize(
    ("limit", "values"),
    [
        (torch.nan_to_num, torch.ones(2, 1)),
        (lambda values: values.clamp(max=10), torch.ones(2, 1)),
        (lambda values: values.clamp(min=-10), torch.ones(2, 1)),
        (lambda values: torch.where(values == 0, 5, values), torch.ones(2, 1)),
        (lambda values: values.clamp(min=0), torch.ones(2, 1, dtype=torch.int64)),
    ],
)
@pytest.mark.parametrize("format", ["torchscript", "pt2"])
def test_values_that_the_sample_lacks_are_compared(
    limit: Any, values: torch.Tensor, format: Any, tmp_path: Path
) -> None:
    with refused({"torchscript": "not_scriptable", "pt2": "not_exportable"}[format], error=recfx.ExportError) as raised:
        recfx.export(LimitsValues(limit), tmp_path / "model", (batch(2), values), format=format)
    assert "export_differs" in str(raised.value)


class AsksForTheClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection(4)

    def forward(self, features: Any) -> torch.Tensor:
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled * 3 if isinstance(features, TensorDict) else pooled


def tensor_dict(lengths: list[int], first: int = 0) -> TensorDict:
    values = torch.arange(first, first + sum(lengths))
    ids = torch.nested.nested_tensor_from_jagged(values, lengths=torch.tensor(lengths))
    return TensorDict(dict.fromkeys(("f1", "f2", "f3"), ids), batch_size=[])


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_file_answers_the_sample_as_the_model_does_itself(quantize: Any, tmp_path: Path) -> None:
    """A file hands on a KJT in the place of a TensorDict."""
    sample = tensor_dict([2, 1])
    with refused("not_scriptable", match="answers differently", error=recfx.ExportError):
        recfx.export(AsksForTheClass(), tmp_path / "model", (sample,), quantize=quantize)


class LooksUp(AsksForTheClass):
    def forward(self, features: Any) -> torch.Tensor:
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled * 3


def test_other_batches_of_a_tensor_dict_are_tensor_dicts(tmp_path: Path) -> None:
    model = LooksUp().eval()
    given = {name: call.args[0] for name, call, _ in other_batches(model, recfx.Sample(tensor_dict([2, 1])))}
    assert {name: (type(batch), batch["f1"].offsets().tolist()) for name, batch in given.items()} == {
        "a bigger batch": (TensorDict, [0, 2, 3, 5]),
        "a batch of one": (TensorDict, [0, 2]),
        "a batch without ids": (TensorDict, [0, 0, 0]),
        "tensors that are not contiguous": (TensorDict, [0, 2, 3]),
        "other values": (TensorDict, [0, 2, 3]),
    }
    recfx.export(model, tmp_path / "model", (tensor_dict([2, 1]),))
    other = tensor_dict([1, 0, 2], first=1)
    torch.testing.assert_close(recfx.load(tmp_path / "model")(other), model(other))


@dataclass
class Features:
    ids: KeyedJaggedTensor
    dense: torch.Tensor

    @functools.cached_property
    def twice(self) -> torch.Tensor:
        return self.dense * 2


@dataclass
class Prepared(Features):
    def __post_init__(self) -> None:
        self.twice = self.dense * 2


class ReadsMoreThanFields(AsksForTheClass):
    def forward(self, features: Features) -> torch.Tensor:
        pooled: torch.Tensor = self.ebc(features.ids).values()
        return pooled + features.twice


@pytest.mark.parametrize("kind", [Features, Prepared])
@pytest.mark.parametrize("format", ["torchscript", "pt2"])
def test_what_a_batch_holds_besides_its_fields_is_of_the_batch(kind: Any, format: Any, tmp_path: Path) -> None:
    sample, other = (kind(batch(2), torch.full((2, 1), value)) for value in (1.0, 5.0))
    assert sample.twice.sum() == 4  # a property that is cached is an attribute from now on
    model = ReadsMoreThanFields().eval()
    recfx.export(model, tmp_path / "model", (sample,), format=format)
    torch.testing.assert_close(recfx.load(tmp_path / "model")(other), model(other))


def test_threads_may_export_at_once(tmp_path: Path) -> None:
    models = [recfx.convert(LooksUp()) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        reports = threads.map(lambda number: recfx.export(models[number], tmp_path / str(number), batch(2)), range(3))
    assert all(report.path.exists() for report in reports)


class ReadsAnAttribute(AsksForTheClass):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled * getattr(features, "scale", 1.0)


def test_attributes_of_a_batch_are_refused(tmp_path: Path) -> None:
    sample, other = batch(2), batch(2)
    other.scale = torch.ones(()) * 2
    with refused("unsupported_argument", error=recfx.ExportError):
        recfx.export(ReadsAnAttribute(), tmp_path / "model", (other,), format="pt2")
    recfx.export(ReadsAnAttribute(), tmp_path / "model", (sample,), format="pt2")
    with refused("wrong_argument", error=recfx.InputError):
        recfx.load(tmp_path / "model")(other)


class ReturnsADataclass(AsksForTheClass):
    def forward(self, features: KeyedJaggedTensor) -> Prepared:
        return Prepared(features, self.ebc(features).values())


def test_a_dataclass_is_returned_by_its_fields(tmp_path: Path) -> None:
    model, sample = ReturnsADataclass().eval(), batch(2)
    recfx.export(model, tmp_path / "model", (sample,))
    answer = recfx.load(tmp_path / "model")(sample)
    assert list(answer) == ["ids", "dense"]
    torch.testing.assert_close(answer["dense"], model(sample).dense)
