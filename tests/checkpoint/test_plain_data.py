"""Plain data as JSON: everything that is written comes back as it was, and nothing else is read."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch

from recfx.checkpoint.plain_data import decode, encode

VALUES: list[Any] = [
    None, True, 0, -(2**70), 0.1, float("inf"), "", "a b", [], [1, ["x"]], (), (1, (2, None)), set(), {1, "a"}, {},
    {"a": 1, (1, 2): {3: 4.0}}, b"", b"\0\xff", 2 - 3j, torch.Size([2, 0]), torch.float16, torch.device("cpu"),
    torch.device("cuda", 1),
]  # fmt: skip


NAMES = [f"{number}-{type(value).__name__}" for number, value in enumerate(VALUES)]


@pytest.mark.parametrize("value", VALUES, ids=NAMES)
def test_what_is_written_is_read(value: Any) -> None:
    decoded = decode(encode(value))
    assert decoded == value
    assert type(decoded) is type(value)


def test_the_order_of_dicts() -> None:
    for kind in (dict, OrderedDict):
        decoded = decode(encode(kind([("b", 1), ("a", kind())])))
        assert list(decoded) == ["b", "a"]
        assert [type(item) for item in (decoded, decoded["a"])] == [kind, kind]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.tensor(7, dtype=torch.int16),
        torch.tensor([True, False]),
        torch.empty(0, 3, dtype=torch.float64),
        torch.arange(6).view(2, 3).t(),
        torch.eye(3)[:1, 1],  # contiguous, but with a stride of three
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(2, requires_grad=True),
    ],
)
@pytest.mark.parametrize("around", ["nothing", "device"])
def test_tensors(tensor: torch.Tensor, around: str) -> None:
    content = encode(tensor)
    with torch.device("meta" if around == "device" else "cpu"):
        decoded = decode(content)
    assert (decoded.dtype, decoded.device.type, decoded.requires_grad) == (tensor.dtype, "cpu", False)
    assert torch.equal(decoded, tensor.detach())


def test_numbers_of_numpy() -> None:
    values = [numpy.float64(0.1), numpy.int64(3), numpy.bool_(True)]
    decoded = decode(encode(values))
    assert decoded == [0.1, 3, True]
    assert [type(item) for item in decoded] == [float, int, bool]


class Named(dict):  # type: ignore[type-arg]
    """A dict of another type."""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "builtins.object"),
        (numpy.float32(1), "numpy.float32"),
        (Named(), "Named"),
        ([{"a": (frozenset(),)}], "builtins.frozenset in 'a'"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.empty(2, dtype=torch.float8_e8m0fnu), "dtype torch.float8_e8m0fnu"),
    ],
)
def test_what_is_not_plain(value: Any, name: str) -> None:
    with pytest.raises(TypeError) as caught:
        encode(value)
    assert name in str(caught.value)


def test_what_contains_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(RecursionError):
        encode(value)


def tensor(**changed: Any) -> dict[str, Any]:
    return {"tensor": {"dtype": "float32", "size": [2], "content": "AAAAAAAAAAA=", **changed}}


def test_the_tensor_below_is_one() -> None:
    assert torch.equal(decode(json.dumps(tensor()).encode()), torch.zeros(2))


@pytest.mark.parametrize(
    "content",
    [
        {}, {"a": 1}, {"tuple": [], "set": []}, {"tuple": "ab"}, {"tuple": {"a": 1}}, {"set": [{"dict": []}]},
        {"set": "ab"}, {"dict": [[1]]}, {"dict": [1]}, {"dict": [[[1], 2]]}, {"bytes": "A!=="}, {"bytes": "AAAA\nAAAA"},
        {"bytes": 1}, {"complex": [1, 2, 3]}, {"size": ["a"]}, {"dtype": "getattr"}, {"device": 0},
        {"device": "nowhere"}, tensor(dtype="qint8"), tensor(size=[3]), tensor(size=[1]), tensor(size=[-1, -2]),
        tensor(size=[2.0]), tensor(size=[True, 2]), tensor(size=2), tensor(content="AAAA"),
        tensor(content="AAAAAAAAAA!A="),
        {"tensor": {"dtype": "float32", "size": [2]}}, {"tensor": []},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_what_encode_does_not_write(content: Any) -> None:
    with pytest.raises(ValueError):
        decode(json.dumps(content).encode())
    with pytest.raises(ValueError):
        decode(json.dumps([content]).encode())


def test_brackets_without_end() -> None:
    with pytest.raises(ValueError, match="RecursionError"):
        decode(b"[" * 100_000)
