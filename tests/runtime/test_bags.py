"""Bags that are gathered, renamed or thinned out: every part of the batch that results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.runtime.bags import as_sent, expanded, keep_ids, permute_features, select_bags, with_values


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bags_are_copied_in_any_order(dtype: torch.dtype) -> None:
    batch = source(dtype=dtype)
    values, lengths, offsets, weights = select_bags(batch, on_cpu([3, 0, 2, 3]), batch.weights())
    assert values.tolist() == [13, 14, 15, 10, 11, 13, 14, 15]
    assert (values.dtype, offsets.dtype) == (dtype, torch.int64)
    assert lengths.tolist() == [3, 2, 0, 3]
    assert offsets.tolist() == [0, 3, 5, 5, 8]
    assert weights is not None
    assert weights.tolist() == [3.0, 4.0, 5.0, 0.0, 1.0, 3.0, 4.0, 5.0]
    assert select_bags(source(weights=False), on_cpu([0]), None)[3] is None


def test_of_a_batch_on_meta_the_number_of_bags_is_known() -> None:
    batch = source(dtype=torch.int32).to(torch.device("meta"))
    values, lengths, offsets, weights = select_bags(batch, torch.zeros(3, device="meta"), batch.weights())
    assert (values.shape, lengths.shape, offsets.shape) == ((6,), (3,), (4,))
    assert (values.dtype, lengths.dtype, offsets.dtype) == (torch.int32, torch.int64, torch.int64)
    assert weights is batch.weights()


@pytest.mark.parametrize("weights", ["none", "constant", "trained", "bfloat16", "float64"])
def test_features_are_selected_repeated_and_renamed(weights: str) -> None:
    batch = source(weights != "none", weights == "trained", of_weights=getattr(torch, weights, torch.float32))
    selected = permute_features(batch, [1, 0, 1], ["x", "y", "z"])
    scale = None if weights == "none" else [3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert_is(selected, ["x", "y", "z"], [[], [13, 14, 15], [10, 11], [12], [], [13, 14, 15]], scale)
    if weights == "trained":
        selected.weights().sum().backward()
        assert batch.weights().grad.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]  # type: ignore[union-attr]


def test_a_batch_of_no_samples_stays_one() -> None:
    batch = KeyedJaggedTensor(["a", "b"], on_cpu([]), None, lengths=on_cpu([]), stride=0)
    selected = permute_features(batch, [1, 0], ["b", "a"])
    assert_is(selected, ["b", "a"], [], None)


def test_a_batch_of_no_keys_has_samples_all_the_same() -> None:
    assert permute_features(source(), [], []).stride() == 2
    nothing = KeyedJaggedTensor([], on_cpu([]), None, lengths=on_cpu([], torch.int32), offsets=on_cpu([0]), stride=3)
    for selected in (
        with_values(nothing, nothing.values(), None),
        as_sent(nothing),
        keep_ids(nothing, nothing.values(), nothing.values() > 0),
    ):
        assert (selected.keys(), selected.stride()) == ([], 3)


def test_bags_are_expanded_by_inverse_indices() -> None:
    batch = KeyedJaggedTensor(
        ["a", "b", "c"],
        on_cpu([10, 11, 12, 13, 14, 15]),
        on_cpu([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], torch.float32),
        lengths=on_cpu([1, 2, 1, 2]),
        stride_per_key_per_rank=[[1], [2], [1]],
    )
    inverse = on_cpu([[0, 0, 0], [1, 0, 1], [0, 0, 0]])
    selected = expanded(batch, [2, 1, 0], [1, 2, 1], inverse, ["c", "b", "a"])
    bags = [[14, 15], [14, 15], [14, 15], [13], [11, 12], [13], [10], [10], [10]]
    assert_is(selected, ["c", "b", "a"], bags, [float(id_ - 10) for bag in bags for id_ in bag])


def test_other_values_in_the_same_bags() -> None:
    batch = source(weights=False)
    values, weights = on_cpu([0, 1, 2, 3, 4, 5]), on_cpu([1.0] * 6, torch.float32)
    bags = [[0, 1], [2], [], [3, 4, 5]]
    batch.offsets()
    assert_is(with_values(batch, values, weights), ["a", "b"], bags, [1.0] * 6)
    assert_is(with_values(batch, values, None, ["x", "y"]), ["x", "y"], bags, None)


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


@pytest.mark.parametrize("weights", [False, True])
def test_ids_are_taken_out_of_their_bags(weights: bool) -> None:
    batch = source(weights)
    kept = on_cpu([False, True, False, True, False, True], torch.bool)
    selected = keep_ids(batch, batch.values() + 1, kept)
    assert_is(selected, ["a", "b"], [[12], [], [], [14, 16]], [1.0, 3.0, 5.0] if weights else None)
    assert selected.offsets().dtype == torch.int64
