"""Target ``npu`` on a simulated NPU: everything around its kernels, and references in their place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.errors import ConversionError
from recfx.ir import format_graph
from recfx.kernels.build import launch
from tests.ascend.npu_runtime.training import DEVICE, assert_close, make_batch, train
from tests.builders.collections import one_table, sequences, table
from tests.builders.optimizers import attach
from tests.checkpoint.training import KINDS
from tests.models.case import tensors_in

# The order of sums differs.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
HASHING: dict[str, recfx.HashConfig | None] = {
    "adopted": None,
    "evict": recfx.HashConfig(dense_rows=0, on_full="evict"),
    "admit": recfx.HashConfig(dense_rows=0, admit_after=2, unseen="share"),
}


pytestmark = pytest.mark.usefixtures("simulated_kernels")


@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("hashing", HASHING)
def test_trains_as_the_cpu(hashing: str, optimizer: str) -> None:
    sizes = {"rows": 24, "distinct": 24 if HASHING[hashing] is None else 60}
    expected, actual = (train(device, optimizer, HASHING[hashing], **sizes) for device in ("cpu", DEVICE))
    assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("build", [one_table, sequences])
def test_its_name_is_in_the_graph(build: Callable[[], nn.Module]) -> None:
    model = recfx.convert(nn.Sequential(build())).to(DEVICE)
    text = format_graph(model[0].graph_module)
    assert "kernel=npu" in text
    assert "kernel=reference" not in text


@pytest.mark.parametrize(
    ("hashing", "optimizer"), [*((hashing, "rowwise_adagrad") for hashing in HASHING), ("adopted", ""), ("admit", "")]
)
def test_sequences_beside_pooled_tables_train_as_on_the_cpu(hashing: str, optimizer: str) -> None:
    """Outputs, weights and gradients of three steps, and an eval forward."""
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = nn.ModuleDict({"pooled": one_table(("a", "b"), rows=24, dim=8), "rows": sequences(features="abc")})
        if optimizer:
            attach(model, optimizer)
        model = recfx.convert(model, hashing=HASHING[hashing]).to(device)
        kept = []
        for number in range(3):
            features = make_batch(number, 20 if HASHING[hashing] is None else 60, HASHING[hashing] is not None)
            outputs = [*tensors_in([part(features.to(torch.device(device))) for part in model.values()])]
            values = [output for output in outputs if output.is_floating_point()]
            sum(value.square().sum() for value in values).backward()
            kept += [output.detach().cpu() for output in outputs]
        with torch.no_grad():
            kept += [output.cpu() for output in tensors_in(model.eval()["rows"](features.to(torch.device(device))))]
        kept += [parameter.detach().cpu() for parameter in model.parameters()]
        kept += [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        results.append(kept)
    assert len(results[0]) == len(results[1])
    for actual, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(actual, expected, **CLOSE)


def test_gradients_of_tables_and_of_weights_of_ids() -> None:
    """Without a fused optimizer, two calls add up."""
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        converted = recfx.convert(one_table(("a", "b"), rows=12, dim=5))
        converted.to(device)
        for number in range(2):
            features = make_batch(number, 12, False)
            chosen = features.split([2, 1])[0]
            converted(chosen.to(torch.device(device))).values().square().sum().backward()
        (weight,) = converted.parameters()
        results.append(weight.grad.cpu())
    torch.testing.assert_close(results[1], results[0], **CLOSE)


def test_gradients_of_weights_of_ids_that_share_a_row_until_they_are_admitted() -> None:
    """As on the CPU; by which operators, the table of round trips says."""
    hashing = recfx.HashConfig(dense_rows=0, admit_after=2, unseen="share")
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        tables = [table("t", ["a", "b"], rows=30, dim=5)]
        converted = recfx.convert(EmbeddingBagCollection(tables, is_weighted=True), hashing=hashing).to(device)
        gradients = []
        for number in range(4):
            features = make_batch(number, 24, True).split([2, 1])[0]
            weights = torch.linspace(-1, 1, features.values().numel()).requires_grad_()
            weighted = KeyedJaggedTensor(features.keys(), features.values(), weights, lengths=features.lengths())
            converted(weighted.to(torch.device(device))).values().square().sum().backward()
            assert weights.grad is not None
            gradients.append(weights.grad)
        results.append([*gradients, *(parameter.grad.cpu() for parameter in converted.parameters())])
    assert all(bool(gradient.any()) for gradient in results[0])
    for actual, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(actual, expected, **CLOSE)


def test_without_the_simulation_the_reference_serves_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    launch.is_possible.cache_clear()
    converted = recfx.convert(nn.Sequential(one_table()))
    converted.to(DEVICE)
    report = str(recfx.explain(converted))
    assert "kernel_fallback" in report
    assert "triton-ascend" in report
    with pytest.raises(ConversionError, match="triton-ascend") as caught:
        recfx.convert(nn.Sequential(one_table()).to(DEVICE), backend="npu")
    assert caught.value.reason == "backend_unusable"
