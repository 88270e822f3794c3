"""Target ``fbgemm_ascend`` on a simulated NPU, with packages that stand in for the one of that name."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from recfx.errors import ConversionError
from recfx.ir import format_graph
from recfx.kernels.build import launch
from recfx.lowering import _fbgemm_ascend_operator as operator
from tests.ascend.npu_runtime.training import DEVICE
from tests.builders.collections import collection, one_table
from tests.builders.optimizers import OPTIMIZERS, attach

PACKAGES = Path(__file__).with_name("stand_in_packages")
FEATURES = ("f1", "f2", "f3")  # of ``collection``: t1 is summed; t2, of two features, is averaged
HASHING = {
    "adopted": None,
    "evict": recfx.HashConfig(dense_rows=0, on_full="evict"),
    "admit": recfx.HashConfig(dense_rows=0, admit_after=2, unseen="share"),
}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
DEFINED = 'import torch\nlibrary = torch.library.Library("fbgemm", "FRAGMENT")\nlibrary.define("{schema}")\n'
OTHER = "split_embedding_codegen_forward_unweighted_cuda(Tensor dev_weights, Tensor indices) -> Tensor"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    operator.why_not.cache_clear()
    yield
    operator.why_not.cache_clear()
    package = sys.modules.pop("fbgemm_ascend", None)
    if package is not None:
        package.library._destroy()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in, importable."""
    monkeypatch.syspath_prepend(PACKAGES)
    return importlib.import_module("fbgemm_ascend")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Makes another package importable, given its text."""

    def write(text: str) -> None:
        (tmp_path / "fbgemm_ascend.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    return write


def batch(number: int, raw: bool, longest: int = 4) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, longest, (len(FEATURES) * 5,), generator=draw)
    ids = torch.randint(0, 30 if raw else 20, (int(lengths.sum()),), generator=draw)
    return KeyedJaggedTensor(list(FEATURES), ids * 2**40 - 5 if raw else ids, lengths=lengths)


def train(
    device: str, standard: nn.Module, optimizer: str, hashing: recfx.HashConfig | None
) -> tuple[nn.Module, list[torch.Tensor]]:
    """Five steps and an eval forward in inference mode; the model and its outputs."""
    standard = copy.deepcopy(standard)
    if optimizer:
        attach(standard, optimizer)
    converted = recfx.convert(standard, hashing=hashing)
    converted.to(device)
    raw, outputs = hashing is not None, []
    for number in range(5):
        # The third batch has no ids.
        pooled = converted(batch(number, raw, 1 if number == 2 else 4).to(torch.device(device))).values()
        (pooled - 1).square().sum().backward()
        outputs.append(pooled.detach().cpu())
    converted.eval()
    with torch.inference_mode():
        outputs.append(converted(batch(99, raw).to(torch.device(device))).values().cpu())
    return converted, outputs


# Tables that evict need a fused optimizer.
CASES = [case for case in product(HASHING, [*OPTIMIZERS, ""]) if case != ("evict", "")]


@pytest.mark.parametrize(("hashing", "optimizer"), CASES)
def test_trains_as_the_cpu(hashing: str, optimizer: str, package: ModuleType) -> None:
    """It serves by itself where ``npu`` cannot; there is no triton-ascend here."""
    torch.manual_seed(0)
    standard = collection()
    wanted, expected = train("cpu", standard, optimizer, HASHING[hashing])
    package.calls.clear()
    found, outputs = train(DEVICE, standard, optimizer, HASHING[hashing])
    torch.testing.assert_close(outputs, expected, **CLOSE)
    for (name, value), other in zip(wanted.state_dict().items(), found.state_dict().values(), strict=True):
        torch.testing.assert_close(other.cpu(), value, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
    for one, other in zip(wanted.parameters(), found.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None) == bool(optimizer)
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(other.grad.cpu(), one.grad, **CLOSE)
    printed = format_graph(found.graph_module)
    assert "kernel=fbgemm_ascend" in printed
    assert "kernel=reference" not in printed
    assert len(package.calls) >= 10  # two tables, four batches with ids, and the last one
    assert min(package.calls) > 0


@pytest.mark.parametrize("find_on_device", [False, True])
def test_ids_that_read_nothing_do_not_reach_the_operator(
    find_on_device: bool, package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In eval mode, ids without a row are zeros, wherever rows are found; the stand-in refuses rows of -1."""
    if find_on_device:
        monkeypatch.setenv(launch.SIMULATED, "1")
    torch.manual_seed(0)
    standard, outputs = collection(), []
    for device in ("cpu", DEVICE):
        model = copy.deepcopy(standard).to(device)
        backend = "auto" if device == "cpu" else "fbgemm_ascend"
        converted = recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0), backend=backend)
        converted(batch(0, True).to(torch.device(device)))
        converted.eval()
        outputs.append(converted(batch(1, True).to(torch.device(device))).values().detach().cpu())
    torch.testing.assert_close(outputs[1], outputs[0], **CLOSE)
    assert (outputs[0] == 0).any()


def test_frozen_tables_and_the_gradients_of_others(package: ModuleType) -> None:
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        standard = collection()
        attach(standard, "adam")
        standard.embedding_bags["t1"].weight.requires_grad_(False)
        converted = recfx.convert(standard)
        converted.to(device)
        converted(batch(0, False).to(torch.device(device))).values().square().sum().backward()
        results.append([value.cpu() for value in converted.state_dict().values()])
        (optimizer,) = converted.weight("t1")._in_backward_optimizers
        assert not optimizer.state[converted.weight("t1")]
    torch.testing.assert_close(results[1], results[0], **CLOSE)


def test_a_batch_without_samples(package: ModuleType) -> None:
    converted = recfx.convert(collection())
    converted.to(DEVICE)
    none = torch.empty(0, dtype=torch.int64)
    features = KeyedJaggedTensor(list(FEATURES), none, lengths=none, stride=0).to(torch.device(DEVICE))
    assert converted(features).values().shape == (0, 24)
    assert package.calls == []


def report_of(model: nn.Module) -> str:
    converted = recfx.convert(nn.Sequential(model))
    converted.to(DEVICE)
    report = recfx.explain(converted)
    return "\n".join([str(report), *(str(reason) for reason in report.reasons)])


def test_the_report_names_the_target(package: ModuleType) -> None:
    told = report_of(collection())
    assert "fbgemm_ascend" in told
    assert "kernel_fallback" not in told


def test_the_report_says_that_it_is_simulated(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(collection()).to(DEVICE)
    assert "simulated_kernels" not in str(recfx.explain(recfx.convert(model, backend="fbgemm_ascend")))
    monkeypatch.setenv(launch.SIMULATED, "1")
    model = nn.Sequential(collection()).to(DEVICE)
    assert "simulated_kernels" in str(recfx.explain(recfx.convert(model, backend="fbgemm_ascend")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "raise RuntimeError('built for another torch')",
            r"cannot be imported \(RuntimeError: built for another torch",
        ),
        ("import a_library_that_is_not_there", r"cannot be imported \(ModuleNotFoundError"),
        ("import torch\nlibrary = torch.library.Library('fbgemm', 'FRAGMENT')", "has no kernel of fbgemm::split"),
        # torch_npu would run it on the host, if that had a kernel.
        (DEFINED.format(schema=OTHER), "has no kernel of fbgemm::split"),
        (
            DEFINED.format(schema=OTHER) + f"library.impl('{OTHER.partition('(')[0]}', lambda *_: None, 'PrivateUse1')",
            "takes other arguments",
        ),
    ],
)
def test_another_package_is_declined_with_its_reason(text: str, said: str, written: Callable[[str], None]) -> None:
    written(text)
    model = nn.Sequential(collection()).to(DEVICE)
    with pytest.raises(ConversionError, match=said) as caught:
        recfx.convert(model, backend="fbgemm_ascend")
    assert caught.value.reason == "backend_unusable"
    told = report_of(collection())
    assert "kernel_fallback" in told
    assert "fbgemm_ascend: " in told


def test_without_the_package_or_with_other_columns_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fbgemm_ascend is not installed" in report_of(collection())
    operator.why_not.cache_clear()
    monkeypatch.syspath_prepend(PACKAGES)
    assert "multiple of 8 columns, table 't' has 4" in report_of(one_table())
