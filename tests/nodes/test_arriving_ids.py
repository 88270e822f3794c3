"""Ids in transit are put in the order of features as TorchRec puts them."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.dist_data import _get_recat
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.nodes.arriving_ids import in_order_of_features

KEYS = ["f0", "f1", "f2"]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("strides", [[2, 2], [4, 1, 3], [0, 2], [0, 0], [5]], ids=str)
@pytest.mark.parametrize("keys", [[], ["f0"], KEYS], ids=len)
def test_equals_torchrec(keys: list[str], strides: list[int], weighted: bool) -> None:
    draw = torch.Generator().manual_seed(len(keys))
    lengths = torch.randint(0, 4, (len(keys) * sum(strides),), generator=draw)
    values = torch.randperm(int(lengths.sum()), generator=draw)
    weights = torch.rand(values.numel(), generator=draw) if weighted else None
    found = in_order_of_features(keys, lengths, values, weights, strides)
    expected = KeyedJaggedTensor.dist_init(
        keys=keys,
        tensors=[lengths, values, *([] if weights is None else [weights])],
        variable_stride_per_key=False,
        num_workers=len(strides),
        recat=_get_recat(len(keys), len(strides), batch_size_per_rank=strides),
        stride_per_rank=strides,
    )
    assert (found.keys(), found.stride()) == (expected.keys(), expected.stride())
    for name in ("values", "lengths", "weights_or_none"):
        torch.testing.assert_close(getattr(found, name)(), getattr(expected, name)(), rtol=0, atol=0)
    assert found.offsets().tolist() == [0, *expected.lengths().cumsum(0).tolist()]
