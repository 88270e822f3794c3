"""Bags that are gathered, renamed or thinned out: every part of the batch that results."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.runtime.bags import as_sent, keep_ids, permute_features, with_values


@pytest.fixture(params=["cpu", "meta"], ids=["default_cpu", "default_meta"], autouse=True)
def _default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tensors are made where the batch is, whatever torch's default device is."""
    with torch.device(request.param):
        yield


def on_cpu(values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def source(
    weights: bool = True,
    requires_grad: bool = False,
    dtype: torch.dtype = torch.int64,
    of_weights: torch.dtype = torch.float32,
    **more: Any,
) -> KeyedJaggedTensor:
    """Two samples of ``a`` ([10, 11], [12]) and ``b`` ([], [13, 14, 15])."""
    scale = on_cpu([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], of_weights).requires_grad_(requires_grad)
    lengths = on_cpu([2, 1, 0, 3], dtype)
    return KeyedJaggedTensor(
        ["a", "b"], on_cpu([10, 11, 12, 13, 14, 15], dtype), scale if weights else None, lengths=lengths, **more
    )


def assert_is(features: KeyedJaggedTensor, keys: list[str], bags: list[list[int]], weights: list[float] | None) -> None:
    """Lengths and offsets are both there already, as int64: no later node computes them again."""
    assert features.keys() == keys
    assert features.values().tolist() == [id_ for bag in bags for id_ in bag]
    assert features.lengths_or_none().tolist() == [len(bag) for bag in bags]  # type: ignore[union-attr]
    ends = [sum(map(len, bags[:number])) for number in range(len(bags) + 1)]
    assert features.offsets_or_none().tolist() == ends  # type: ignore[union-attr]
    scale = features.weights_or_none()
    assert (None if scale is None else scale.tolist()) == weights
    assert features.stride() == len(bags) // len(keys)


@pytest.mark.parametrize("weights", ["none", "constant", "trained", "bfloat16", "float64"])
def test_features_are_selected_repeated_and_renamed(weights: str) -> None:
    batch = source(weights != "none", weights == "trained", of_weights=getattr(torch, weights, torch.float32))
    selected = permute_features(batch, [1, 0, 1], ["x", "y", "z"])
    scale = None if weights == "none" else [3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert_is(selected, ["x", "y", "z"], [[], [13, 14, 15], [10, 11], [12], [], [13, 14, 15]], scale)
    if weights == "trained":
        selected.weights().sum().backward()
        assert batch.weights().grad.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]  # type: ignore[union-attr]


def test_a_batch_of_no_keys_has_samples_all_the_same() -> None:
    assert permute_features(source(), [], []).stride() == 2
    nothing = KeyedJaggedTensor([], on_cpu([]), None, lengths=on_cpu([], torch.int32), offsets=on_cpu([0]), stride=3)
    for selected in (
        with_values(nothing, nothing.values(), None),
        as_sent(nothing),
        keep_ids(nothing, nothing.values(), nothing.values() > 0),
    ):
        assert (selected.keys(), selected.stride()) == ([], 3)


@pytest.mark.parametrize(
    ("ids", "lengths", "weights", "is_same"),
    [
        (torch.int64, torch.int64, None, True),
        (torch.int64, torch.int64, torch.float32, True),
        (torch.int32, torch.int64, None, False),
        (torch.int64, torch.int32, torch.float32, False),
        (torch.int64, torch.int64, torch.float64, False),
        (torch.int32, torch.int32, torch.float16, False),
    ],
)
def test_what_is_sent_has_one_type(
    ids: torch.dtype, lengths: torch.dtype, weights: torch.dtype | None, is_same: bool
) -> None:
    scale = None if weights is None else on_cpu([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], weights)
    batch = KeyedJaggedTensor(
        ["a", "b"], on_cpu([10, 11, 12, 13, 14, 15], ids), scale, lengths=on_cpu([2, 1, 0, 3], lengths)
    )
    sent = as_sent(batch)
    assert (sent is batch) == is_same
    assert sent.keys() == ["a", "b"]
    assert (sent.values().dtype, sent.lengths().dtype) == (torch.int64, torch.int64)
    assert (sent.values().tolist(), sent.lengths().tolist()) == ([10, 11, 12, 13, 14, 15], [2, 1, 0, 3])
    outgoing = sent.weights_or_none()
    assert (outgoing is None) == (weights is None)
    assert outgoing is None or (outgoing.dtype, outgoing.tolist()) == (torch.float32, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
