"""Models that iterate over the features of their batch: traced with those of the sample, and served with no others."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from tests.exporter.hashed_models import call, trained
from tests.support.refusals import refused


@dataclass
class Both:
    dense: torch.Tensor
    features: KeyedJaggedTensor


class Shifts(nn.Module):
    """Adds a number to the ids of each feature, by the feature's place in the batch."""

    def forward(self, both: Both) -> Both:
        copied = copy.deepcopy(both)
        features = copied.features
        if not isinstance(features, KeyedJaggedTensor) or features.variable_stride_per_key():
            raise TypeError("one batch size, please")
        if features.weights_or_none() is not None:
            raise TypeError("no weights, please")
        shifted = []
        for place, key in enumerate(features.keys()):
            values = features[key].values()
            shifted.append(values if key == "d" else values + place * 3)
        kind = type(features)
        copied.features = kind(keys=features.keys(), values=torch.cat(shifted), lengths=features.lengths())
        copied.features = KeyedJaggedTensor(
            [f"{key}" for key in copied.features.keys()],  # noqa: SIM118  # a batch is not a dict
            copied.features.values(),
            None,
            copied.features.lengths(),
        )
        return copied


class ShiftsFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shifts = Shifts()
        self.inner = trained()

    def forward(self, both: Both) -> torch.Tensor:
        both = self.shifts(both)
        return self.inner(both.dense, both.features)


def both_of(sample: recfx.Sample) -> recfx.Sample:
    return recfx.Sample(Both(*sample.args))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return ShiftsFirst().eval()


@pytest.fixture(scope="module")
def file(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model.pt"
    recfx.export(model, path, both_of(call(6)))
    return path


@pytest.mark.parametrize("batch_size", [5, 1, 0])
def test_code_that_iterates_over_features_is_traced(model: nn.Module, file: Path, batch_size: int) -> None:
    sample = both_of(call(batch_size, seed=9))
    torch.testing.assert_close(recfx.load(file)(*sample.args), model(*sample.args), rtol=1e-5, atol=1e-6)


def _batch(keys: list[str], **changed: Any) -> Both:
    fields = {"values": torch.arange(len(keys)), "lengths": torch.ones(len(keys), dtype=torch.int64)} | changed
    return Both(torch.zeros(1, 1), KeyedJaggedTensor(keys, **fields))


@pytest.mark.parametrize(
    ("batch", "reason", "message"),
    [
        (_batch(["c", "a", "b"]), "other_features", r"\[c, a, b, d\], in this order"),
        (_batch(["c", "a", "b", "d", "e"]), "other_features", r"\[c, a, b, d\], in this order"),
        (_batch(["a", "b", "c", "d"]), "other_features", r"\[c, a, b, d\], in this order"),
        (_batch(["c", "a", "b", "d"], weights=torch.ones(4)), "bad_weights", "without weights"),
        (_batch(["c", "a", "b", "d"], lengths=None, offsets=torch.tensor([0, 1, 2, 3, 4, 4]), values=torch.arange(4),
                stride_per_key_per_rank=[[1], [1], [1], [2]]), "bad_lengths", "different batch sizes"),
    ],
)  # fmt: skip
def test_other_features_than_the_samples_are_refused(file: Path, batch: Both, reason: str, message: str) -> None:
    with refused(reason, match=message, error=recfx.InputError):
        recfx.load(file)(batch)


class Branches(nn.Module):
    def forward(self, both: Both) -> Both:
        if both.dense.sum() > 0:
            return both
        return Both(both.dense + 1, both.features)


def test_what_stays_untraceable_is_named_with_its_line(model: nn.Module, tmp_path: Path) -> None:
    branching = copy.copy(model)
    branching._modules = {**model._modules, "shifts": Branches()}
    with pytest.raises(
        recfx.ExportError, match=r"shifts: it cannot be traced .* \(at \S+test_batch_proxies.py:\d+\)\)"
    ) as caught:
        recfx.export(branching, tmp_path / "model.pt", both_of(call(6)))
    assert (caught.value.reason, caught.value.module_path) == ("not_scriptable", "shifts")
    assert list(tmp_path.iterdir()) == []
