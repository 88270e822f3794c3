"""Exported hashed models: answers, rows, files, and what is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torchrec import KeyedJaggedTensor

import recfx
from recfx.exporter import served_collection
from recfx.kernels.build import library
from recfx.kernels.lookup.quantized_rows import dequantize_rows, quantize_rows
from tests.exporter.conftest import UsualExport
from tests.exporter.hashed_models import HASHING, HashedModel, call, trained
from tests.support.refusals import refused


def test_recfx_operators_are_for_torchscript(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("invalid_argument", error=recfx.ExportError):
        recfx.export(model, tmp_path / "m.pt2", call(6), format="pt2", portable=False)
    report = recfx.export(model, tmp_path / "m.pt", call(6), portable=False)
    assert [path.name.startswith("librecfx") for path in report.libraries] == [True]
    assert f"needs {report.libraries[0]}: ship it too" in str(report)
    monkeypatch.setattr(library, "load", lambda: False)
    monkeypatch.setattr(library, "why_not", lambda: "there is no compiler")
    for use in (
        lambda: recfx.load(tmp_path / "m.pt"),
        lambda: recfx.export(model, tmp_path / "n.pt", call(6), portable=False),
    ):
        with refused("no_library", match="there is no compiler", error=recfx.ExportError):
            use()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": None}, "model is None"),
        ({"model": HashedModel}, "model is the class HashedModel"),
        ({"format": ["pt2"]}, "is not a format"),
        ({"format": "onnx"}, "is not a format"),
        ({"portable": "no"}, "portable is a str. .*of type bool"),
        ({"device": 3}, "device=3 cannot serve a file"),
        ({"device": ""}, "device='' cannot serve a file"),
        ({"device": torch.device("meta")}, "cannot serve a file"),
    ],
)
def test_arguments_that_mean_nothing(wrong: dict[str, Any], message: str, model: nn.Module, tmp_path: Path) -> None:
    with refused("invalid_argument", match=message, error=recfx.ExportError):
        recfx.export(**{"model": model, "path": tmp_path / "m.pt", "sample": call(6)} | wrong)
    with refused("model_on_meta", error=recfx.ExportError):
        recfx.export(HashedModel().to("meta"), tmp_path / "m.pt", call(6))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hashing", [recfx.HashConfig(dense_rows=0), None, recfx.HashConfig()])
def test_tables_of_one_kind_alone(hashing: recfx.HashConfig | None, tmp_path: Path) -> None:
    """Indexes without id -1, without dense rows and without shared rows leave nothing to complete."""
    model = recfx.convert(HashedModel(), hashing=hashing)
    sample = call(6, low=0)
    model(*sample.args)
    recfx.export(model.eval(), tmp_path / "model.pt", sample)
    assert torch.allclose(recfx.load(tmp_path / "model.pt")(*sample.args), model(*sample.args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("quantize", "bits"), [("int8", 8), ("int4", 4)])
def test_quantized_rows_are_those_of_the_format(quantize: str, bits: int, usual_export: UsualExport) -> None:
    report = usual_export(False, quantize)
    assert {table.stored_as for table in report.tables} == {quantize}
    plain = trained()
    largest = {}
    for name, bag in plain.ebc.embedding_bags.items():
        rows = bag.weight.detach()
        odd = rows.size(1) % 2 if bits == 4 else 0
        padded = torch.nn.functional.pad(rows, (0, odd), mode="replicate")
        stored = dequantize_rows(quantize_rows(padded, bits), padded.size(1), bits)[:, : rows.size(1)]
        largest[name] = float((stored - rows).abs().max())
        bag.weight.data.copy_(stored)
    assert {table.table: table.error for table in report.tables} == pytest.approx(largest)
    sample = call(5, seed=9)
    assert torch.allclose(recfx.load(report.path)(*sample.args), plain(*sample.args), rtol=1e-4, atol=1e-5)


def test_each_table_has_its_own_format(model: nn.Module, tmp_path: Path) -> None:
    report = recfx.export(model, tmp_path / "m.pt", call(6), quantize={"mean": "fp16", "ebc.adopted": "int8"})
    assert {table.table: table.stored_as for table in report.tables} == {
        "shared_by_two": "fp32", "some_dense": "fp32", "mean": "fp16", "adopted": "int8",
    }  # fmt: skip
    assert 0 < report.output_error < 1e-2
    assert re.search(r"\nebc.mean +64 +fp16 +896 B +1.8 KiB +\S", str(report))


@pytest.mark.parametrize(("quantize", "value"), [("fp16", 7e4), ("int8", [-7e4, 0]), ("int8", 2e7), ("int4", 1e6)])
def test_rows_that_a_format_cannot_hold_are_refused(quantize: str, value: Any, tmp_path: Path) -> None:
    hashed = trained()
    weight = hashed.ebc.embedding_bags["shared_by_two"].weight  # type: ignore[union-attr, index]
    with torch.no_grad():
        weight[3, :2] = torch.tensor(value)
    (tmp_path / "m.pt").write_text("old")
    with pytest.raises(recfx.ExportError, match=r"rows of table 'shared_by_two'.* no finite value as") as raised:
        recfx.export(hashed, tmp_path / "m.pt", call(6), quantize=quantize)
    assert (raised.value.reason, raised.value.module_path) == ("rows_out_of_range", "ebc")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
    report = recfx.export(hashed, tmp_path / "m.pt", call(6), quantize={"mean": quantize})
    assert report.tables[0].error == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_report_says_that_a_row_was_not_finite(value: float, tmp_path: Path) -> None:
    hashed = trained()
    with torch.no_grad():
        hashed.ebc.embedding_bags["shared_by_two"].weight[3, 0] = value  # type: ignore[union-attr, index]
    report = recfx.export(hashed, tmp_path / "m.pt", call(6), quantize="int8")
    assert [table.error == float("inf") for table in report.tables] == [True, False, False, False]
    report = recfx.export(hashed, tmp_path / "m.pt", call(6), quantize="fp16")
    assert max(table.error for table in report.tables) < 1e-2  # fp16 holds it, and the row's other values


class _Absolute(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.abs()


@pytest.mark.parametrize("format", ["torchscript", "pt2"])
@pytest.mark.parametrize(
    "add",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        lambda linear: parametrize.register_parametrization(linear, "bias", _Absolute()),
    ],
    ids=["weight norm", "spectral norm", "one's own"],
)
def test_parametrizations_have_their_values_in_eval_mode(
    add: Callable[[nn.Module], Any], format: str, tmp_path: Path
) -> None:
    hashed = trained()
    add(hashed.linear)  # type: ignore[arg-type]
    names = list(hashed.state_dict())
    recfx.export(hashed, tmp_path / "m", call(6), format=format)
    assert parametrize.is_parametrized(hashed.linear)  # type: ignore[arg-type]
    assert list(hashed.state_dict()) == names
    sample = call(5, seed=9)
    assert torch.allclose(recfx.load(tmp_path / "m")(*sample.args), hashed(*sample.args), rtol=1e-5, atol=1e-6)


class _OneIsNotCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.called, self.other = HashedModel(), HashedModel()

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        if self.training:
            dense = dense + self.other(dense, features)
        return self.called(dense, features)


def test_a_collection_that_is_not_called_is_not_in_the_report_either(tmp_path: Path) -> None:
    report = recfx.export(recfx.convert(_OneIsNotCalled(), hashing=HASHING), tmp_path / "m.pt", call(6, low=0))
    assert {table.collection for table in report.tables} == set(report.passes) == {"called.ebc"}
    assert [(note.code, note.path) for note in report.notes] == [("collection_left_out", "other.ebc")]
    assert list(recfx.load(tmp_path / "m.pt").manifest["collections"]) == ["called.ebc"]


def test_the_passes_are_listed_with_their_graphs(model: nn.Module, tmp_path: Path) -> None:
    report = recfx.export(model, tmp_path / "m.pt", call(6), quantize={"mean": "int8"})
    assert [record.name for record in report.passes["ebc"]] == [
        "expand_collection", "insert_hash", "elide_hash", "batch_lookups", "freeze_indexes", "quantize_rows",
        "fuse_served_lookup", "lower",
    ]  # fmt: skip
    assert report.graph == GRAPH.strip()


GRAPH = """
dense = input
features = input
ebc_select_features = select_features(features)
ebc_find_rows = find_rows(ebc_select_features) {hashed=[shared_by_two, some_dense, mean], frozen}
ebc_lookup = lookup(ebc_find_rows) {tables=[shared_by_two, some_dense, mean, adopted], combine=SUM, \
stored=[torch.float32, torch.float32, torch.quint8, torch.float32], kernel=fbgemm}
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[some_dense, mean]}
ebc_keyed_tensor = keyed_tensor([ebc_mean_divide])
values = call_method[values](ebc_keyed_tensor)
linear = call_module[linear](values)
add = call_function[add](linear, dense)
return add
"""


# Files


def test_a_file_that_answers_differently_is_not_kept(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooled_rows = served_collection.stored_rows
    monkeypatch.setattr(served_collection, "stored_rows", lambda rows, form: pooled_rows(rows + 1, form))
    with pytest.raises(recfx.ExportError, match="export_differs"):
        recfx.export(model, tmp_path / "model.pt", call(6))
    assert list(tmp_path.iterdir()) == []


class _Branching(nn.Module):
    """Branches on data, so that TorchScript has to compile its own code, without its hooks."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if bool(values.sum() > 0):
            return values
        return values * 2


@pytest.mark.parametrize("quantize", [None, "int8", "int4", "fp16"])
def test_a_hook_that_would_be_lost_is_seen_also_when_rows_are_quantized(quantize: str | None, tmp_path: Path) -> None:
    model = HashedModel()
    model.linear = nn.Sequential(model.linear, _Branching())
    converted = recfx.convert(model, hashing=HASHING).eval()
    called: list[int] = []
    hook = converted.linear[1].register_forward_hook(lambda *_: called.append(1))
    report = recfx.export(converted, tmp_path / "plain.pt", call(6), quantize=quantize)
    assert [(note.code, note.path) for note in report.notes][-1:] == [("hooks_left_out", "linear.1")]
    assert report.output_error < 0.05
    hook.remove()
    converted.linear[1].register_forward_hook(lambda _, inputs, output: output + 1)
    with pytest.raises(recfx.ExportError, match="TorchScript compiles the module's own code") as raised:
        recfx.export(converted, tmp_path / "m.pt", call(6), quantize=quantize)
    assert (raised.value.reason, raised.value.module_path) == ("not_scriptable", "linear.1")
    assert "the file answers differently" in str(raised.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plain.pt"]


def test_a_failed_export_leaves_the_old_file(model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    recfx.export(model, path, call(6))
    before = path.read_bytes()
    with refused("sample_failed", error=recfx.ExportError):
        recfx.export(model, path, recfx.Sample(torch.zeros(1), None))
    with refused("invalid_argument", error=recfx.ExportError):
        recfx.export(model, path, call(6), quantize={"no_such_table": "int8"})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def test_eval_counters_do_not_count_the_export(tmp_path: Path) -> None:
    model = trained()
    before = {name: index.counters for name, index in model.ebc.hash_indexes.items()}
    recfx.export(model, tmp_path / "model.pt", call(6))
    assert {name: index.counters for name, index in model.ebc.hash_indexes.items()} == before
