"""Files for devices other than the CPU: operators of ATen alone, which also run on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from recfx.exporter import load
from recfx.exporter.compare_outputs import first_difference, run_model
from recfx.exporter.patterns import return_pattern, take_apart
from tests.builders.collections import one_table
from tests.exporter.conftest import UsualExport
from tests.exporter.hashed_models import call
from tests.models import ZOO
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def file(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model.pt"
    recfx.export(model, path, call(6), device="npu")
    return path


def _operators(path: Path) -> set[str]:
    script: Any = torch.jit.load(str(path))
    return {name.split("::")[0] for name in torch.jit.export_opnames(script)}


def test_files_have_no_operators_but_those_that_they_are_allowed(
    model: nn.Module, file: Path, usual_export: UsualExport, tmp_path: Path
) -> None:
    assert _operators(file) == {"aten", "prim"}
    assert _operators(usual_export(False, None).path) == {"aten", "prim", "fbgemm"}
    recfx.export(model, tmp_path / "model.pt2", call(6), format="pt2", portable=True)
    with (tmp_path / "model.pt2").open("rb") as opened:
        graph = torch.export.load(opened).graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    operators = {target.namespace for target in called if isinstance(target, torch._ops.OpOverload)}
    assert operators == {"aten", "fbgemm"}
    assert {target.__module__ for target in called if not isinstance(target, torch._ops.OpOverload)} <= {"_operator"}


MIXED = {"mean": "int4", "adopted": "fp16", "some_dense": "int8"}


@pytest.mark.parametrize(
    ("is_weighted", "quantize"),
    [(False, None), (True, "fp16"), (True, "int8"), (False, "int4"), (True, MIXED)],
    ids=["plain", "weighted fp16", "weighted int8", "int4", "weighted and mixed"],
)
def test_it_answers_as_the_file_for_the_cpu(
    is_weighted: bool, quantize: Any, model_of: dict[bool, nn.Module], usual_export: UsualExport, tmp_path: Path
) -> None:
    sample = call(6, is_weighted=is_weighted)
    usual = usual_export(is_weighted, quantize)
    report = recfx.export(model_of[is_weighted], tmp_path / "npu", sample, quantize=quantize, device="npu:0")
    assert report.tables == usual.tables
    assert "kernel=aten" in report.graph
    of_cpu, loaded = recfx.load(usual.path), recfx.load(tmp_path / "npu")
    for batch_size in (0, 1, 7):
        for low, high in ((-20, 20), (-(2**63), 2**63 - 1), (10_000, 20_000)):
            sample = call(batch_size, seed=9, low=low, high=high, is_weighted=is_weighted)
            assert torch.allclose(loaded(*sample.args), of_cpu(*sample.args), rtol=1e-5, atol=1e-5)


def test_every_id_of_a_full_index_is_found(tmp_path: Path) -> None:
    """However far it is from its home slot."""
    model = recfx.convert(one_table(("a",), rows=5000), hashing=recfx.HashConfig(dense_rows=0, rows=5000))
    ids = torch.randint(-(2**62), 2**62, (5000,), generator=torch.Generator().manual_seed(0))
    model(KeyedJaggedTensor(["a"], ids, lengths=torch.ones(5000, dtype=torch.int64))).values().sum().backward()
    features = KeyedJaggedTensor(["a"], ids.flip(0), lengths=torch.ones(5000, dtype=torch.int64))
    recfx.export(model, tmp_path / "model", (features,), device="npu")
    expected = model.eval()(features).values()
    assert expected.abs().sum(1).gt(0).float().mean() > 0.9
    assert torch.allclose(recfx.load(tmp_path / "model")(features).values(), expected)


@pytest.mark.parametrize("name", ["dlrm", "deep_fm", "sparse_nn", "dataclass_input", "tied_weight"])
def test_models(name: str, tmp_path: Path) -> None:
    (case,) = [case for case in ZOO if case.name == name]
    with case.around():
        model = recfx.convert(case.model(), case.sample(), verify=False)
        report = recfx.export(model, tmp_path / "model.pt", case.sample(), device="npu")
        codes = [note.code for note in report.notes if note.severity == "warning"]
        assert codes == []
        assert _operators(tmp_path / "model.pt") == {"aten", "prim"}
        sample = case.sample(7)
        reference, answer = run_model(model.eval(), sample), run_model(recfx.load(tmp_path / "model.pt"), sample)
        expected, actual = (list(take_apart(return_pattern(value), value).items()) for value in (reference, answer))
        assert first_difference(expected, actual, case.rtol, case.atol) is None


class CallsFbgemm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = one_table()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(features.lengths())
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled * offsets[-1]


def test_operators_that_a_device_may_lack_are_named(tmp_path: Path) -> None:
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    report = recfx.export(CallsFbgemm(), tmp_path / "model.pt", (features,), device="npu")
    assert [note.code for note in report.notes if note.severity == "warning"] == ["operators_of_the_model"]
    assert "fbgemm" in _operators(tmp_path / "model.pt")


def test_a_file_for_the_cpu_stays_there(
    model: nn.Module, usual_export: UsualExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = usual_export(False, None).path
    monkeypatch.setattr(load, "usable_device", torch.device)  # as if every device were here
    with refused("wrong_device", match="device='cuda'", error=recfx.ExportError):
        recfx.load(path, device="cuda:0")
    assert recfx.load(path, device="cpu")(*call(2).args).device.type == "cpu"
    with refused("invalid_argument", error=recfx.ExportError):
        recfx.export(model, tmp_path / "other", call(6), format="pt2", device="npu")
    assert not (tmp_path / "other").exists()
