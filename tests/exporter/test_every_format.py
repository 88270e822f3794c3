"""What every exported file does alike, whatever its format and its operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from tests.exporter.changed_records import ChangeRecords, Records, rewrite, swapped, with_another, without_one
from tests.exporter.hashed_models import FEATURES, call, trained

FORMATS: dict[str, dict[str, Any]] = {
    "torchscript": {},
    "with recfx's operators": {"portable": False},
    "for a device": {"device": "npu"},
    "pt2": {"format": "pt2"},
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained()


@pytest.fixture(scope="module", params=FORMATS)
def file(model: nn.Module, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model"
    recfx.export(model, path, call(6), **FORMATS[request.param])
    return path


@pytest.fixture(scope="module")
def loaded(file: Path) -> recfx.LoadedModel:
    return recfx.load(file)


def test_features_come_in_any_order(model: nn.Module, loaded: recfx.LoadedModel) -> None:
    dense, features = call(5, seed=9).args
    more = KeyedJaggedTensor(["other"], torch.arange(3), lengths=torch.tensor([1, 0, 2, 0, 0]))
    shuffled = KeyedJaggedTensor.concat([more, features.permute([2, 0, 3, 1])])
    assert shuffled.keys() != FEATURES
    assert torch.allclose(loaded(dense, shuffled), model(dense, features), rtol=1e-5, atol=1e-6)


ABCD = ["a", "b", "c", "d"]


def _features(keys: list[str], values: Any, lengths: list[int]) -> recfx.Sample:
    return recfx.Sample(torch.zeros(1, 1), KeyedJaggedTensor(keys, torch.tensor(values), lengths=torch.tensor(lengths)))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (_features(["a", "b", "c"], [1], [1, 0, 0]), "missing_feature"),
        (_features(ABCD, [1.0], [1, 0, 0, 0]), "wrong_id_dtype"),
        (_features(ABCD, [1], [2, -1, 0, 0]), "bad_lengths"),
        (_features(ABCD, [1], [2, 0, 0, 0]), "bad_lengths"),
        (_features(ABCD, [1], [0, 0, 0, 0]), "bad_lengths"),
        (_features(ABCD, [1], []), "bad_lengths"),
        (_features(ABCD, [1], [2**62, 2**62, 2**62, 2**62, 1, 0, 0, 0]), "bad_lengths"),
        (_features(ABCD, [20], [0, 0, 0, 1]), "id_out_of_range"),
        (_features(ABCD, [-1], [0, 0, 0, 1]), "id_out_of_range"),
        (recfx.Sample(torch.zeros(1, 1)), "wrong_argument"),
        (recfx.Sample(torch.zeros(1, 1), torch.zeros(1)), "wrong_argument"),
        (recfx.Sample(torch.zeros(1, 1), None, 1), "wrong_argument"),
    ],
)
def test_a_wrong_batch_is_one_clear_error(loaded: recfx.LoadedModel, wrong: recfx.Sample, reason: str) -> None:
    with pytest.raises(recfx.InputError) as raised:
        loaded(*wrong.args)
    assert raised.value.reason == reason


def test_features_of_different_batch_sizes_are_refused(loaded: recfx.LoadedModel) -> None:
    features = KeyedJaggedTensor(
        ABCD,
        torch.tensor([1, 2]),
        lengths=torch.tensor([1, 1, 0, 0, 0, 0, 0, 0]),
        stride_per_key_per_rank=[[2], [2], [3], [1]],
    )
    with pytest.raises(recfx.InputError, match=r"different batch sizes|same number of samples") as raised:
        loaded(torch.zeros(2, 1), features)
    assert raised.value.reason == "bad_lengths"


@pytest.mark.parametrize("change", [swapped, with_another, without_one])
def test_records_that_belong_to_another_file_are_refused(change: ChangeRecords, file: Path, tmp_path: Path) -> None:
    rewrite(file, tmp_path / "changed", change)
    with pytest.raises(
        recfx.ExportError, match="its records are not those that its manifest was written for"
    ) as raised:
        recfx.load(tmp_path / "changed")
    assert raised.value.reason == "damaged_file"


def test_a_file_may_be_packed_again(model: nn.Module, loaded: recfx.LoadedModel, file: Path, tmp_path: Path) -> None:
    """In another order, and without the records that name the sources."""

    def change(records: Records) -> Records:
        return {name: records[name] for name in reversed(records) if not name.endswith(".debug_pkl")}

    rewrite(file, tmp_path / "packed", change)
    sample = call(5, seed=9)
    assert torch.equal(recfx.load(tmp_path / "packed")(*sample.args), loaded(*sample.args))
