"""Which settings and which state of an optimizer can be taken, and what is refused of crafted ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import optim

import recfx
from recfx.checkpoint import plain_data, settings, storage
from recfx.checkpoint.optimizer_fits import check_settings_fit, check_state_fits, is_number
from recfx.checkpoint.settings import pack_settings, read_settings

VALID: dict[str, Any] = {
    "extra_state": {"head._extra_state": {"any": (1, 2)}},
    "in_backward": {
        "weight": {"kind": "adam", "settings": {"lr": 0.1}, "values": {"count": 1}, "tensors": ["exp_avg", "step"]},
        "cut": {"kind": "x", "settings": {}, "values": {}, "tensors": [], "blocks": [(0, 2), (2, 3), (3, 8)]},
    },
    "optimizer": {
        "kind": "Adam",
        "groups": [{"params": ["a", "b"], "lr": 0.1}, {"params": []}],
        "state": {"a": {"values": {"step": 1}, "tensors": ["exp_avg"]}},
        "any_order": True,
    },
    "warm_ups": {"0.inner": [3, 1]},
}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """``read_settings`` of a checkpoint that has this in place of its settings."""

    def reads(value: Any) -> Any:
        content = torch.frombuffer(bytearray(plain_data.encode(value)), dtype=torch.uint8)
        monkeypatch.setattr(storage, "read", lambda folder, described: {"settings": content})
        folder: Any = SimpleNamespace(path=Path("data"))
        return read_settings(folder, {"settings": content.to("meta")})

    return reads


def test_what_is_packed_is_read(reads: Callable[[Any], Any]) -> None:
    packed = pack_settings(VALID)
    assert (packed.dtype, packed.dim()) == (torch.uint8, 1)
    assert plain_data.decode(packed.numpy().tobytes()) == VALID
    assert reads(VALID) == VALID
    assert reads({**VALID, "optimizer": None}) == {**VALID, "optimizer": None}


def test_settings_from_before_there_were_warm_ups(reads: Callable[[Any], Any]) -> None:
    before = {name: value for name, value in VALID.items() if name != "warm_ups"}
    assert reads(before) == {**before, "warm_ups": {}}


def test_the_largest_that_can_be_packed(monkeypatch: pytest.MonkeyPatch, reads: Callable[[Any], Any]) -> None:
    size = pack_settings(VALID).numel()
    monkeypatch.setattr(settings, "_MOST_BYTES", size)
    assert pack_settings(VALID).numel() == size
    assert reads(VALID) == VALID
    monkeypatch.setattr(settings, "_MOST_BYTES", size - 1)
    for refused in (pack_settings, reads):
        with pytest.raises(recfx.CheckpointError) as caught:
            refused(VALID)
        assert caught.value.reason == ("checkpoint_torn" if refused is reads else "value_not_supported")


def test_what_cannot_be_packed() -> None:
    itself: dict[str, Any] = {}
    itself["itself"] = itself
    for value, words in ((itself, "(a value that contains itself)"), ({"a": object()}, "(builtins.object in 'a')")):
        with pytest.raises(recfx.CheckpointError) as caught:
            pack_settings(value)
        assert caught.value.reason == "value_not_supported"
        assert words in caught.value.message


@pytest.mark.parametrize(
    "entry",
    [
        None,
        torch.zeros(3, dtype=torch.int8, device="meta"),
        torch.zeros((), dtype=torch.uint8, device="meta"),
        torch.zeros(3, 1, dtype=torch.uint8, device="meta"),
    ],
)
def test_settings_that_are_no_bytes(entry: Any) -> None:
    folder: Any = SimpleNamespace(path=Path("data"))
    with pytest.raises(recfx.CheckpointError, match="it has no settings") as caught:
        read_settings(folder, {} if entry is None else {"settings": entry})
    assert caught.value.reason == "checkpoint_torn"


MISSING = object()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("extra_state", MISSING, "settings has no 'extra_state', or one of the wrong type"),
        ("extra_state", [], "settings has no 'extra_state', or one of the wrong type"),
        ("extra_state", {1: 2}, "extra_state has keys that are not names"),
        ("in_backward", MISSING, "settings has no 'in_backward', or one of the wrong type"),
        ("in_backward", None, "settings has no 'in_backward', or one of the wrong type"),
        ("in_backward", {1: {}}, "in_backward has keys that are not names"),
        ("optimizer", MISSING, "settings has no 'optimizer', or one of the wrong type"),
        ("optimizer", [], "settings has no 'optimizer', or one of the wrong type"),
        ("in_backward weight", 3, "in_backward of 'weight' is an int"),
        ("in_backward weight kind", 3, "in_backward of 'weight' has no 'kind'"),
        ("in_backward weight settings", [], "in_backward of 'weight' has no 'settings'"),
        ("in_backward weight values", None, "in_backward of 'weight' has no 'values'"),
        ("in_backward weight tensors", (), "in_backward of 'weight' has no 'tensors'"),
        ("in_backward weight settings", {1: 2}, "in_backward of 'weight' has keys that are not names"),
        ("in_backward weight values", {1: 2}, "in_backward of 'weight' has keys that are not names"),
        ("in_backward weight settings params", [], "in_backward of 'weight' has wrong names"),
        ("in_backward weight tensors", ["step", "step"], "in_backward of 'weight' has wrong names"),
        ("in_backward weight tensors", [1], "in_backward of 'weight' has wrong names"),
        ("in_backward weight tensors", ["count"], "in_backward of 'weight' has wrong names"),
        ("in_backward cut blocks", ((0, 8),), "in_backward of 'cut' has wrong blocks"),
        ("in_backward cut blocks", [[0, 8]], "in_backward of 'cut' has wrong blocks"),
        ("in_backward cut blocks", [(0, 8.0)], "in_backward of 'cut' has wrong blocks"),
        ("in_backward cut blocks", [(False, 8)], "in_backward of 'cut' has wrong blocks"),
        ("in_backward cut blocks", [(0, 4, 8)], "in_backward of 'cut' has wrong blocks"),
        ("in_backward cut blocks", None, "in_backward of 'cut' has wrong blocks"),
        ("in_backward cut blocks", [], "in_backward of 'cut' has no blocks"),
        ("in_backward cut blocks", [(1, 8)], "in_backward of 'cut' has blocks that do not follow each other"),
        ("in_backward cut blocks", [(0, 0), (0, 8)], "in_backward of 'cut' has blocks that do not follow each other"),
        ("in_backward cut blocks", [(0, 4), (5, 8)], "in_backward of 'cut' has blocks that do not follow each other"),
        ("in_backward cut blocks", [(0, 4), (4, 3)], "in_backward of 'cut' has blocks that do not follow each other"),
        ("optimizer kind", None, "optimizer has no 'kind'"),
        ("optimizer groups", (), "optimizer has no 'groups'"),
        ("optimizer state", [], "optimizer has no 'state'"),
        ("optimizer any_order", 1, "optimizer has a wrong 'any_order'"),
        ("optimizer groups", [[]], "a group of optimizer is a list"),
        ("optimizer groups", [{}], "a group of optimizer has no 'params'"),
        ("optimizer groups", [{"params": [], 1: 2}], "a group of optimizer has keys that are not names"),
        ("optimizer groups", [{"params": ["a", "a"]}], "a group of optimizer has wrong params"),
        ("optimizer groups", [{"params": [1]}], "a group of optimizer has wrong params"),
        ("optimizer state", {1: {}}, "optimizer has keys that are not names"),
        ("optimizer state a", None, "the state of 'a' is None"),
        ("optimizer state a values", [], "the state of 'a' has no 'values'"),
        ("optimizer state a tensors", None, "the state of 'a' has no 'tensors'"),
        ("optimizer state a values", {1: 2}, "the state of 'a' has keys that are not names"),
        ("optimizer state a tensors", ["step"], "the state of 'a' has wrong names"),
        ("optimizer state a tensors", ["x", "x"], "the state of 'a' has wrong names"),
        ("optimizer state a tensors", [None], "the state of 'a' has wrong names"),
        ("warm_ups", [3, 1], "the warm-ups are no dict"),
        ("warm_ups", {3: [3, 1]}, "warm-ups has keys that are not names"),
        ("warm_ups", {"": [3]}, "a warm-up has a wrong state"),
        ("warm_ups", {"": (3, 1)}, "a warm-up has a wrong state"),
        ("warm_ups", {"": [3, True]}, "a warm-up has a wrong state"),
        ("warm_ups", {"": [3, -1]}, "a warm-up has a wrong state"),
        ("warm_ups", {"": [1 << 63, 0]}, "a warm-up has a wrong state"),
    ],
)
def test_settings_of_another_shape(reads: Callable[[Any], Any], path: str, value: Any, message: str) -> None:
    settings = copy.deepcopy(VALID)
    *parents, key = path.split()
    place = settings
    for parent in parents:
        place = place[parent]
    if value is MISSING:
        del place[key]
    else:
        place[key] = value
    with pytest.raises(recfx.CheckpointError) as caught:
        reads(settings)
    assert caught.value.reason == "checkpoint_torn"
    assert f"its settings are invalid: {message}" in caught.value.message


def test_settings_that_are_no_dict(reads: Callable[[Any], Any]) -> None:
    with pytest.raises(recfx.CheckpointError, match="its settings are invalid: settings is a list"):
        reads([])


@pytest.mark.parametrize(
    ("saved", "current", "fits"),
    [
        (0.1, 1, True),
        (1, 0.1, True),
        (0.1, numpy.float64(0.1), True),
        (torch.tensor(0.1), 0.1, True),
        (0.1, torch.tensor(0.1), True),
        (torch.ones(2), torch.zeros(2), True),
        (torch.ones(2), torch.zeros(3), False),
        (torch.ones(2), 0.1, False),
        (torch.tensor(True), 0.1, False),
        (torch.tensor(1j), 0.1, False),
        (0.1, "fast", False),
        ("fast", 0.1, False),
        ("fast", "slow", True),
        (True, False, True),
        (True, 1, False),
        (1, True, False),
        (2**63, 1, True),  # of one type, though no number that a kernel takes
        (2**63, 1.0, False),
        ((0.9, 0.99), (0.9, 0.999), True),
        ([0.9, 0.99], (0.9, 0.999), True),
        ((0.9,), (0.9, 0.999), False),
        ((0.9, "x"), (0.9, 0.999), False),
        ((0.9, 0.99), 0.9, False),
        (None, None, True),
        (True, None, True),
        (0.5, None, True),
        ("x", None, True),
        (torch.ones(2), None, True),
        ([1], None, False),
        (None, True, True),
        (None, 0.1, False),
    ],
)
def test_settings_of_another_kind(saved: Any, current: Any, fits: bool) -> None:
    check_settings_fit({"params": saved, "param_names": saved, "new": saved}, {"params": current, "param_names": 3}, "")
    if fits:
        return check_settings_fit({"new": 1, "lr": saved}, {"lr": current}, "layer")
    with pytest.raises(recfx.CheckpointError, match=r"its setting 'lr' was saved as .*, but is .* here") as caught:
        check_settings_fit({"new": 1, "lr": saved}, {"lr": current}, "layer")
    assert (caught.value.reason, caught.value.module_path) == ("checkpoint_mismatch", "layer")
    return None


def test_settings_are_shown_briefly() -> None:
    with pytest.raises(recfx.CheckpointError) as caught:
        check_settings_fit({"lr": torch.ones(2, 3)}, {"lr": "x" * 100}, "")
    assert f"saved as a tensor of shape (2, 3), but is '{'x' * 49} here" in caught.value.message


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, True), (-1.5, True), (2**63 - 1, True), (2**63, False), (-(2**63), False), (True, False), (None, False),
        ("1", False), (torch.tensor(1), True), (torch.tensor(1.0), True), (torch.tensor([1]), False),
        (torch.tensor(True), False), (torch.tensor(1j), False),
    ],
    ids=repr,
)  # fmt: skip
def test_numbers(value: object, expected: bool) -> None:
    assert is_number(value) == expected


MATRIX, SCALAR = torch.zeros(2, 3), torch.zeros(())
ONE = torch.tensor(1.0)
ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "amsgrad": False}


@pytest.mark.parametrize(
    ("optimizer", "parameter", "tensors", "values", "message"),
    [
        (optim.Adam, MATRIX, {"step": ONE, "exp_avg": MATRIX, "exp_avg_sq": MATRIX}, {}, ""),
        (optim.Adam, MATRIX, {"exp_avg": MATRIX, "exp_avg_sq": MATRIX}, {"step": 1}, ""),
        (optim.Adam, SCALAR, {"step": ONE, "exp_avg": ONE}, {"exp_avg_sq": 0.5}, ""),
        (optim.Adam, MATRIX, {}, {}, ""),
        (optim.Adam, MATRIX, {"step": ONE, "exp_avg": MATRIX}, {}, "its saved state lacks 'exp_avg_sq'"),
        (optim.Adam, MATRIX, {"exp_avg": MATRIX, "exp_avg_sq": MATRIX}, {}, "its saved state lacks 'step'"),
        (optim.Adam, MATRIX, {}, {"other": 1}, "its saved state lacks 'step'"),
        (
            optim.Adam, MATRIX, {"step": ONE, "exp_avg": MATRIX.t(), "exp_avg_sq": MATRIX}, {},
            "its state 'exp_avg' was saved as a tensor of shape (3, 2), but the parameter is (2, 3)",
        ),
        (
            optim.Adam, MATRIX, {"step": ONE, "exp_avg": MATRIX}, {"exp_avg_sq": 0.5},
            "its state 'exp_avg_sq' was saved as 0.5, but the parameter is (2, 3)",
        ),
        (
            optim.Adam, MATRIX, {"step": MATRIX, "exp_avg": MATRIX, "exp_avg_sq": MATRIX}, {},
            "its state 'step' was saved as a tensor of shape (2, 3), but the parameter is (2, 3)",
        ),
        (
            optim.Adam, MATRIX, {"exp_avg": MATRIX, "exp_avg_sq": MATRIX}, {"step": "x"},
            "its state 'step' was saved as 'x', but the parameter is (2, 3)",
        ),
        (
            optim.Adam, SCALAR, {"step": ONE, "exp_avg": torch.ones(1), "exp_avg_sq": ONE}, {},
            "its state 'exp_avg' was saved as a tensor of shape (1,), but the parameter is ()",
        ),
        (
            optim.Adam, MATRIX[0], {"step": ONE, "exp_avg": torch.ones(2), "exp_avg_sq": MATRIX[0]}, {},
            "its state 'exp_avg' was saved as a tensor of shape (2,), but the parameter is (3,)",
        ),
        (optim.SGD, MATRIX, {"momentum_buffer": MATRIX}, {}, ""),
        (optim.SGD, MATRIX, {}, {"other": None}, ""),
        (optim.SGD, MATRIX, {}, {"other": True}, ""),
        (optim.SGD, MATRIX, {"other": MATRIX, "more": ONE}, {}, ""),
        (optim.SGD, MATRIX, {}, {"other": "x"}, "its state 'other' was saved as 'x', but the parameter is (2, 3)"),
        (
            optim.SGD, MATRIX, {"other": torch.ones(4)}, {},
            "its state 'other' was saved as a tensor of shape (4,), but the parameter is (2, 3)",
        ),
        (optim.LBFGS, MATRIX, {"other": torch.ones(4)}, {"more": "x"}, ""),
    ],
)  # fmt: skip
def test_a_state(optimizer: type, parameter: torch.Tensor, tensors: Any, values: Any, message: str) -> None:
    group = ADAM if optimizer is optim.Adam else {"lr": 0.1, "momentum": 0.9}
    if not message:
        return check_state_fits(tensors, values, parameter, optimizer, group, "layer")
    with pytest.raises(recfx.CheckpointError) as caught:
        check_state_fits(tensors, values, parameter, optimizer, group, "layer")
    assert (caught.value.reason, caught.value.module_path) == ("checkpoint_mismatch", "layer")
    assert message in caught.value.message
    return None
