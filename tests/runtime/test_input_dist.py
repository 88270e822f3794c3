"""Ids in transit are put in the order of features as TorchRec puts them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import _get_recat
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.runtime import input_dist
from recfx.runtime.input_dist import in_order_of_features
from tests.builders.batches import batch
from tests.sharding.ranks import ranks

KEYS = ["f0", "f1", "f2"]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("strides", [[2, 2], [4, 1, 3], [0, 2], [0, 0], [5]], ids=str)
@pytest.mark.parametrize("keys", [[], ["f0"], KEYS], ids=len)
def test_equals_torchrec(keys: list[str], strides: list[int], weighted: bool) -> None:
    draw = torch.Generator().manual_seed(len(keys))
    lengths = torch.randint(0, 4, (len(keys) * sum(strides),), generator=draw)
    values = torch.randperm(int(lengths.sum()), generator=draw)
    weights = torch.rand(values.numel(), generator=draw) if weighted else None
    ordered = in_order_of_features(keys, lengths, values, weights, strides)
    expected = KeyedJaggedTensor.dist_init(
        keys=keys,
        tensors=[lengths, values, *([] if weights is None else [weights])],
        variable_stride_per_key=False,
        num_workers=len(strides),
        recat=_get_recat(len(keys), len(strides), batch_size_per_rank=strides),
        stride_per_rank=strides,
    )
    assert (ordered.keys(), ordered.stride()) == (expected.keys(), expected.stride())
    for name in ("values", "lengths", "weights_or_none"):
        torch.testing.assert_close(getattr(ordered, name)(), getattr(expected, name)(), rtol=0, atol=0)
    assert ordered.offsets().tolist() == [0, *expected.lengths().cumsum(0).tolist()]


def exchanged(rank: int, world_size: int, weighted: bool, fbgemm_permutes_on: tuple[str, ...]) -> tuple[Any, Any]:
    """The ids that rank 0 receives of one feature and rank 1 of two."""
    assert dist.group.WORLD is not None
    torch.manual_seed(rank)
    exchange = input_dist.Exchange(dist.group.WORLD, ["ebc"])
    call = input_dist.Call(batch(2 + rank, KEYS, weighted=weighted), [1, 2], 0, input_dist.DistContext())
    with mock.patch.object(input_dist, "FBGEMM_PERMUTES_ON", fbgemm_permutes_on):
        started = exchange.add(call)
        exchange.start()
        ids = started.wait().wait()
    tensors = ids.values(), ids.lengths(), ids.weights_or_none()
    return (ids.keys(), ids.stride()), tensors


@pytest.mark.parametrize("weighted", [False, True])
def test_devices_with_fbgemm_and_others_receive_the_same_ids(weighted: bool) -> None:
    received, expected = (ranks(2).run(exchanged, weighted, devices) for devices in ((), ("cpu",)))
    for ours, of_torchrec in zip(received, expected, strict=True):
        assert ours[0] == of_torchrec[0]
        torch.testing.assert_close(ours[1], of_torchrec[1], rtol=0, atol=0)
