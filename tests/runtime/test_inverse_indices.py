"""Inverse indices: how they are found by name, what is refused, and what the messages say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from recfx.errors import InputError
from recfx.runtime.select_features import InverseIndices

CHECKS = InverseIndices("ebc", ["b@t", "a"])
SIZES = [3, 2]  # of b and a
BATCH = KeyedJaggedTensor(["b", "a"], torch.arange(5), lengths=torch.ones(5).int(), stride_per_key_per_rank=[[3], [2]])
NAMES = ["a", "x", "b"]
GOOD = torch.tensor([[0, 1, 1, 0], [7, 7, 7, 7], [2, 1, 0, 0]])


def changed(row: int, sample: int, index: int) -> torch.Tensor:
    indices = GOOD.clone()
    indices[row, sample] = index
    return indices


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_rows_are_selected_by_name(dtype: torch.dtype, default: str) -> None:
    given = GOOD.to(dtype)
    with torch.device(default):
        found = CHECKS.of_features((NAMES, given), SIZES, BATCH)
    assert (found.dtype, found.device.type) == (torch.int64, "cpu")
    assert found.tolist() == [[2, 1, 0, 0], [0, 1, 1, 0]]


@pytest.mark.parametrize("named", [None, (NAMES, GOOD[:, :0]), (NAMES, torch.empty(3, 0))])
@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_without_any_every_sample_is_a_bag(named: Any, default: str) -> None:
    with torch.device(default):
        found = CHECKS.of_features(named, [3, 3], BATCH)
    assert found.tolist() == [[0, 1, 2], [0, 1, 2]]
    with pytest.raises(InputError, match="there are no inverse indices") as caught:
        CHECKS.of_features(named, SIZES, BATCH)
    assert caught.value.reason == "variable_batch_without_inverse_indices"
    assert caught.value.module_path == "ebc"
    assert "inverse_indices=" in caught.value.what_to_do


def test_of_a_batch_on_meta_nothing_is_read() -> None:
    meta = torch.device("meta")
    found = CHECKS.of_features((NAMES, GOOD + 100), SIZES, BATCH.to(meta))
    assert (found.device, tuple(found.shape), found.dtype) == (meta, (2, 4), torch.int64)
    assert CHECKS.of_features(None, [3, 3], BATCH.to(meta)).device == meta


@pytest.mark.parametrize(
    ("named", "reason", "words"),
    [
        (
            (NAMES, changed(2, 1, 3)),
            "bad_inverse_indices",
            r"ebc: the inverse index 3 of feature 'b' is outside its 3 bags",
        ),
        (
            (NAMES, changed(2, 3, -1)),
            "bad_inverse_indices",
            r"ebc: the inverse index -1 of feature 'b' is outside its 3 bags",
        ),
        (
            (NAMES, changed(0, 2, 2)),
            "bad_inverse_indices",
            r"ebc: the inverse index 2 of feature 'a' is outside its 2 bags",
        ),
        (
            (NAMES, changed(0, 2, 3)),
            "bad_inverse_indices",
            r"ebc: the inverse index 3 of feature 'a' is outside its 2 bags",
        ),
        ((["a", "x", "y"], GOOD), "bad_inverse_indices", r"none for feature 'b', only for \['a', 'x', 'y'\]"),
        ((NAMES, GOOD[:2]), "bad_inverse_indices", "there are 3 names, but indices for 2 features"),
        ((NAMES, GOOD.float()), "bad_inverse_indices", r"they are torch.float32 \[3, 4\]"),
        ((NAMES, GOOD.view(-1)), "bad_inverse_indices", r"they are torch.int64 \[12\]"),
        ((NAMES, GOOD.view(3, 2, 2)), "bad_inverse_indices", r"they are torch.int64 \[3, 2, 2\]"),
        ((NAMES, GOOD.to_sparse()), "bad_inverse_indices", r"they are torch.int64 \[3, 4\]"),
        ((NAMES, GOOD.tolist()), "bad_inverse_indices", "they are <class 'list'>"),
        ((NAMES, GOOD.to("meta")), "several_devices", "inverse_indices are on device meta, but ids on cpu"),
    ],
)
def test_what_does_not_fit_is_named(named: Any, reason: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        CHECKS.of_features(named, SIZES, BATCH)
    assert (caught.value.reason, caught.value.module_path) == (reason, "ebc")
    assert caught.value.what_to_do


def test_every_limit_is_that_of_its_own_feature() -> None:
    """Of the bags of `b`, index 2 is the last; `a` has two."""
    assert CHECKS.of_features((["b", "a"], torch.tensor([[2], [1]])), SIZES, BATCH).tolist() == [[2], [1]]
