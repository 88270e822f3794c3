"""``recfx.verify``, and the check of a conversion, where both models are on an NPU."""

import pytest
import torch
from torchrec import EmbeddingBagCollection, PoolingType

import recfx
from tests.ascend.npu_runtime.training import DEVICE, make_batch
from tests.builders.collections import table
from tests.builders.optimizers import attach

MAY_FALL_BACK = True  # the standard collection computes its offsets by FBGEMM

HASHING = {
    "adopted": recfx.HashConfig(),
    "hashed": recfx.HashConfig(dense_rows=0),
    "admit": recfx.HashConfig(dense_rows=0, admit_after=2, unseen="share"),
}


@pytest.mark.parametrize("hashing", HASHING)
def test_models_are_compared_on_the_device(hashing: str) -> None:
    tables = [table("t0", ["a", "b"], rows=60), table("t1", ["c"], rows=60, pooling=PoolingType.MEAN)]
    plain = EmbeddingBagCollection(tables).to(DEVICE)
    attach(plain, "adagrad")
    sample = (make_batch(0, 60, raw=hashing != "adopted").to(torch.device(DEVICE)),)
    converted = recfx.convert(plain, sample, hashing=HASHING[hashing], verify=True)
    converted(*sample).values().sum().backward()
    assert recfx.verify(plain, converted, sample).ok
    if hashing != "adopted":
        return
    with torch.no_grad():
        plain.embedding_bags["t0"].weight = torch.nn.Parameter(plain.embedding_bags["t0"].weight + 1)
    assert not recfx.verify(plain, converted, sample).ok
