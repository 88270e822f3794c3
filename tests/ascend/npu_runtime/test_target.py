"""Target ``npu`` on a simulated NPU: everything around its kernels, and references in their place."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import recfx
from recfx.errors import ConversionError
from recfx.kernels.build import launch
from recfx.lowering.triton import npu
from tests.ascend.npu_runtime.sharded_coverage import kernels
from tests.ascend.npu_runtime.training import DEVICE, assert_close, make_batch, train
from tests.builders.collections import one_table, sequences
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


pytestmark = pytest.mark.usefixtures("simulated_kernels", "form")


@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("hashing", HASHING)
def test_trains_as_the_cpu(hashing: str, optimizer: str) -> None:
    sizes = {"rows": 24, "distinct": 24 if HASHING[hashing] is None else 60}
    expected, actual = (train(device, optimizer, HASHING[hashing], **sizes) for device in ("cpu", DEVICE))
    assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("build", [one_table, sequences])
def test_its_name_is_in_the_graph(build: Callable[[], nn.Module], form: str) -> None:
    model = recfx.convert(nn.Sequential(build())).to(DEVICE)
    assert kernels(model[0]) == {form}


def test_the_report_says_once_that_nobody_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "measured", lambda *_: None)
    model = recfx.convert(nn.Sequential(one_table(("a", "b")), sequences())).to(DEVICE)
    assert kernels(model[0]) == kernels(model[1]) == {"npu[vendor]"}
    report = recfx.explain(model)
    assert {reason.code for reason in report.reasons} == {"not_measured"}
    assert str(report).count("not_measured") == 1


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
