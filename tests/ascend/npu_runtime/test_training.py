"""Training and eval forwards on an NPU leave what they leave on the CPU."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType

import recfx
from recfx.kernels.index.index_buffers import COUNTERS
from recfx.kernels.route.from_zero import from_zero
from recfx.lowering.triton import npu
from tests.ascend.npu_runtime.training import DEVICE, assert_close, evaluate, make_batch, state_of, step, train
from tests.builders.batches import batch
from tests.builders.collections import table
from tests.builders.optimizers import attach
from tests.checkpoint.training import KINDS, Training

# The order of sums differs between the kernels of the CPU and those chosen for NPUs, nothing else does.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
HASHED = recfx.HashConfig(dense_rows=0)
# How ids become rows, rows, different ids, and what has to happen in training.
TABLES: dict[str, tuple[recfx.HashConfig | None, int, int, tuple[str, ...]]] = {
    "adopted": (recfx.HashConfig(), 40, 40, ()),
    "static": (None, 40, 40, ()),
    "hashed": (replace(HASHED, buckets=4), 200, 60, ("inserted",)),
    "hashed_share": (replace(HASHED, on_full="share", unseen="share"), 16, 60, ("shared_answers",)),
    "evict_lru": (replace(HASHED, on_full="evict"), 24, 60, ("evicted",)),
    "evict_lfu": (replace(HASHED, on_full="evict", evict="lfu"), 24, 60, ("evicted",)),
    "admit_zeros": (replace(HASHED, admit_after=2), 60, 30, ("unseen_answers",)),
    "admit_share_evict": (
        replace(HASHED, admit_after=2, unseen="share", on_full="evict", evict="lfu"),
        12,
        30,
        ("unseen_answers", "evicted"),
    ),
}


@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("tables", TABLES)
def test_equals_the_cpu(tables: str, optimizer: str) -> None:
    hashing, rows, distinct, events = TABLES[tables]
    expected = train("cpu", optimizer, hashing, rows=rows, distinct=distinct)
    actual = train("npu:0", optimizer, hashing, rows=rows, distinct=distinct)
    assert_close(actual, expected, **CLOSE)
    for event in events:
        for counts in (value for name, value in actual.items() if name.endswith(".counts")):
            assert int(counts[COUNTERS.index(event)]) > 0, event


def run_collection(device: str, dtype: torch.dtype, weighted: bool, dense: bool) -> list[torch.Tensor]:
    """Three steps of a collection alone: its outputs, its weights, and the gradients of weights of ids."""
    torch.manual_seed(0)
    pooling = [PoolingType.SUM, PoolingType.SUM if weighted else PoolingType.MEAN]
    tables = [table(f"t{n}", [f"f{n}"], dim=dim, pooling=pooling[n]) for n, dim in enumerate((8, 5))]
    collection = EmbeddingBagCollection(tables, is_weighted=weighted).to(dtype)
    if not dense:
        attach(collection, "adagrad")
    model = recfx.convert(collection).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-2) if dense else None
    kept = []
    for _ in range(3):
        features = batch(5, ("f0", "f1"), weighted=weighted).to(torch.device(device))
        if weighted:
            features.weights().requires_grad_()
        output = model(features).values()
        output.square().sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        kept += [output.detach().float().cpu()]
        kept += [features.weights().grad.cpu()] if weighted else []
    return [*kept, *(parameter.detach().float().cpu() for parameter in model.parameters())]


@pytest.mark.parametrize("dense", [False, True], ids=["fused", "dense"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 2e-2)], ids=str
)
def test_a_collection_alone_equals_the_cpu(dtype: torch.dtype, tolerance: float, weighted: bool, dense: bool) -> None:
    expected = run_collection("cpu", dtype, weighted, dense)
    actual = run_collection("npu:1", dtype, weighted, dense)
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=tolerance, atol=tolerance)


WRONG = {
    "ids": ([0, 1, 20, 3], [1, 1, 1, 1]),
    "total": ([0, 1, 2, 3], [1, 2, 1, 1]),
    "sign": ([0, 1, 2, 3], [-1, 3, 1, 1]),
}


@pytest.mark.parametrize("given_as", ["lengths", "offsets"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.usefixtures("simulated_kernels")
def test_wrong_batches_are_refused_later(wrong: str, given_as: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU: before a backward changes any collection, or when the next batch comes or the mode changes.

    The vendor's lookups take no emptied bags, so the batch is refused at once where they serve.
    """
    monkeypatch.setattr(npu, "measured", lambda *_: 0)
    torch.manual_seed(0)
    names, device = ["f0", "f1"], torch.device(DEVICE)
    collections = [
        EmbeddingBagCollection([table(f"t{name}", [name], rows=rows) for name in names]) for rows in (99, 20)
    ]
    attach(collections[0], "adam")
    attach(collections[1], "adam")
    first, second = (recfx.convert(collection, hashing=None) for collection in collections)
    values, lengths = map(torch.tensor, WRONG[wrong])
    bags = {"lengths": lengths} if given_as == "lengths" else {"offsets": from_zero(lengths, 99) + 7}
    bad, good = KeyedJaggedTensor(names, values, **bags), batch(2, tuple(names)).to(device)
    with pytest.raises(recfx.errors.InputError) as expected:
        second(bad)

    def refused_by(call: Callable[[], object]) -> None:
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            call()

    first, second, bad = first.to(device), second.to(device), bad.to(device)
    (first(good).values().sum() + second(good).values().sum()).backward()
    before = copy.deepcopy([first.state_dict(), second.state_dict()])
    refused_by((first(bad if wrong == "ids" else good).values().sum() + second(bad).values().sum()).backward)
    torch.testing.assert_close([first.state_dict(), second.state_dict()], before, rtol=0, atol=0)
    second.eval()
    pooled = second(bad).values()
    refused_by(lambda: second(good))
    refused_by(pooled.sum().backward)
    second(bad)
    refused_by(second.train)
    second(good).values().sum().backward()


@pytest.mark.parametrize("optimizer", KINDS)
def test_training_continues_on_another_device(optimizer: str) -> None:
    """CPU, NPU, the other NPU, and back: weights, indexes and optimizers move together."""
    path = ["cpu", "npu:0", "npu:1", "cpu"]
    moved, stayed = (Training.build(optimizer, TABLES["evict_lfu"][0], rows=24) for _ in range(2))
    for number, device in enumerate(path):
        moved.model.to(device)
        for state in moved.optimizer.state.values():  # torch's optimizers do not follow their parameters
            state.update({key: value.to(device) for key, value in state.items() if key != "step"})
        features = make_batch(number, 60, raw=True)
        for training, where in ((moved, device), (stayed, "cpu")):
            step(training, features.to(torch.device(where)))
            evaluate(training, features.to(torch.device(where)))
    assert_close(state_of(moved), state_of(stayed), **CLOSE)
