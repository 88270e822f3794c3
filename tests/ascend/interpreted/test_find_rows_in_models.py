"""Collections on target ``triton`` whose rows the kernel finds, in the interpreter."""

import copy

import pytest
import torch
from torchrec import EmbeddingCollection, KeyedJaggedTensor

import recfx
from recfx.ir import format_graph
from tests.ascend import finding_on_device
from tests.ascend.finding_on_device import HASHING, Place
from tests.builders.collections import sequence_table


@pytest.mark.parametrize("case", finding_on_device.CASES)
def test_as_on_the_host(case: str) -> None:
    finding_on_device.CASES[case](Place("cpu", "triton"))


def test_batch_sizes_of_each_key() -> None:
    torch.manual_seed(0)
    plain = EmbeddingCollection([sequence_table("t0", ["f0", "f1"]), sequence_table("t1", ["f2"])])
    there = recfx.convert(copy.deepcopy(plain), hashing=HASHING["zeros"], backend="triton")
    host = recfx.convert(plain, hashing=HASHING["zeros"])
    values, lengths = torch.tensor([7, -1, 7, 9, 8, 7]), torch.tensor([2, 0, 1, 1, 1, 1])
    features = KeyedJaggedTensor(["f0", "f1", "f2"], values, lengths=lengths, stride_per_key_per_rank=[[2], [1], [3]])
    for mode in (True, True, False):
        expected = host.train(mode)(features)
        actual = there.train(mode)(features)
        assert "find_rows(" in format_graph(there.graph_module)
        for key, rows in expected.items():
            assert torch.equal(actual[key].values(), rows.values())
    for name in ("t0", "t1"):
        assert there.index(name).counters == host.index(name).counters
