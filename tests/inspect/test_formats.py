"""The report as JSON and HTML."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from recfx import ExportReport, HashConfig, Sample, VerifyReport, convert, cost
from recfx.errors import Diagnostic, Severity
from recfx.exporter.load import LoadedModel
from recfx.exporter.report import TableSize
from recfx.inspect import (
    REPORT_VERSION,
    CollectionReport,
    HashingReport,
    NodeReport,
    PassReport,
    TableReport,
    Verification,
)
from recfx.inspect.explain import explain
from recfx.inspect.report import plain
from recfx.inspect.report_data import ReportData
from recfx.planner.pricing.hardware import H100
from recfx.verification.verify_report import Check
from tests.inspect.balanced import Balanced
from tests.inspect.models import collection, dlrm, towers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Sample(torch.zeros(2, 3), labels=[1]), "Sample(Tensor[2, 3], labels=list)"),
        (Sample(*range(6)), "Sample(int, int, int, int, and 2 more)"),
        (
            VerifyReport((Check("train", "sample", "outputs", "", "equal"),)),
            "VerifyReport(ok (1 check: 1 equal; rtol=1e-05, atol=1e-06))",
        ),
        (
            ExportReport(Path("a/m.pt"), "pt2", 10, (), "graph", {}, 0.0),
            "ExportReport('m.pt', pt2, 10 B, 0 tables)",
        ),
        (TableReport("t", (), (), 1000, 8, "SUM", "float32", "", 0), "TableReport('t', 1,000 rows of 8 float32)"),
        (CollectionReport(("a", "b"), "Ebc", "kept"), "CollectionReport('a', Ebc, kept, 0 tables)"),
    ],
)
def test_how_objects_print_in_one_line(value: object, text: str) -> None:
    assert repr(value) == text


def test_text_shows_some_of_many_tables() -> None:
    tables = tuple(TableSize("ebc", f"t{number}", "int8", 9, 0, 1, 0, 2, 0.5) for number in range(1000))
    report = ExportReport(Path("m.pt"), "pt2", 10, tables, "", {}, 0.0)
    written = [{"table": table.table, "features": [], "rows": 9, "dim": 1, "pooling": "SUM", "stored_as": "fp32",
                "hashing": None} for table in tables]  # fmt: skip
    none = {"kind": "tuple", "name": "", "type_name": "", "keys": [], "items": [], "value": None, "is_weighted": False}
    manifest = {"recfx_version": "9", "collections": {"ebc": written}, "parameters": [], "arguments": [],
                "positional": 0, "returns": none}  # fmt: skip
    for shown in (report, LoadedModel(nn.Identity(), manifest)):
        lines = str(shown).splitlines()
        assert lines[-1] == "... and 980 more (as_grid().rows has all)"
        assert lines[-2].startswith("ebc.t19 ")
        assert len(lines) == 24
        assert len(shown.as_grid().rows) == shown._repr_html_().count("ebc.t") == 1000
    few = dataclasses.replace(report, tables=tables[:20])
    assert str(few).splitlines()[-1].startswith("ebc.t19 ")


def test_costs_have_the_units_of_reports() -> None:
    model = convert(collection(1))
    priced = cost(model, H100).at(B=2**20, L=1)
    for shown in (str(explain(model)), str(cost(model)), repr(cost(model)), str(priced)):
        assert " 3.1 KiB" in shown
    assert " 144.0 MiB " in str(priced)


def fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def test_json_is_complete_and_in_order() -> None:
    model, sample = dlrm()
    report = explain(convert(model, sample, hashing=HashConfig(dense_rows=0)))
    parsed = json.loads(report.to_json())
    assert parsed["version"] == "1"
    assert list(parsed) == fields(ReportData)
    (one,) = parsed["collections"]
    assert list(one) == [
        "paths",
        "kind",
        "status",
        "reason",
        "message",
        "what_to_do",
        "found",
        "file",
        "line",
        "is_weighted",
        "device",
        "tables",
        "nodes",
        "passes",
        "declined",
        "reasons",
    ]
    assert list(one["tables"][0]) == fields(TableReport)
    assert list(one["tables"][0]["hashing"]) == fields(HashingReport)
    assert list(one["nodes"][0]) == fields(NodeReport)
    assert list(one["passes"][0]) == fields(PassReport)
    assert list(parsed["reasons"][0]) == ["code", "module_path", "message", "what_to_do", "severity"]
    assert list(one["declined"][0]) == ["by", "reason", "message", "node"]
    assert list(parsed["verification"]) == fields(Verification)
    assert one["tables"][0]["hashing"]["counters"] == {
        "batches": 0,
        "ids_seen": 0,
        "inserted": 0,
        "evicted": 0,
        "shared_answers": 0,
        "unseen_answers": 0,
    }
    assert one["nodes"][2]["shape"] == ["B", "16"]
    assert one["nodes"][2]["bytes"] == "64*B"
    assert one["paths"] == ["sparse_arch.embedding_bag_collection"]
    assert parsed["ok"] is True
    assert parsed["verification"]["ok"] is True


@pytest.mark.parametrize(
    ("field", "keys"),
    [
        ("reasons", {"code": "dtype", "module_path": "ebc", "message": "m", "what_to_do": "w", "severity": "warning"}),
        ("notes", {"code": "dtype", "module_path": "ebc", "message": "m", "what_to_do": "w", "severity": "warning"}),
        ("declined", {"by": "fbgemm", "reason": "dtype", "message": "m", "node": "ebc_lookup"}),
        ("kernels_passed_over", {"by": "fbgemm", "reason": "dtype", "message": "m", "node": "ebc_lookup"}),
        ("rollbacks", {"module_path": "ebc", "reason": "dtype", "message": "m"}),
    ],
)
def test_json_of_a_diagnostic_in_each_field(field: str, keys: dict[str, str]) -> None:
    diagnostic = Diagnostic("dtype", "ebc", "m", "w", Severity.WARNING, by="fbgemm", node="ebc_lookup")
    written = json.loads(json.dumps(plain((diagnostic,), field)))
    assert written == [keys]
    assert list(written[0]) == list(keys)


def test_json_is_the_same_every_time() -> None:
    model, sample = towers()
    assert explain(model, sample).to_json() == explain(model, sample).to_json()


def test_a_changed_schema_needs_a_new_version() -> None:
    assert REPORT_VERSION == "1"
    assert fields(ReportData) == [
        "version",
        "recfx_version",
        "torch_version",
        "torchrec_version",
        "ok",
        "collections",
        "reasons",
        "rollbacks",
        "verification",
        "notes",
    ]


@pytest.mark.parametrize("field", ["ok", "collections", "reasons"])
def test_report_is_frozen(field: str) -> None:
    report = explain(collection())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(report, field, None)


def test_each_collection_has_its_device() -> None:
    model, sample = towers()
    devices = {one.kind: one.device for one in explain(model, sample).collections}
    assert devices["EmbeddingCollection"] == devices["EmbeddingBagCollection"] == "cpu"


def test_html_is_one_escaped_page() -> None:
    name = "<script>alert('x')</script>&\""
    page = explain(nn.ModuleDict({name.replace(".", ""): collection(1)})).to_html()
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<script") == 1  # the page's own
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert set(parser.attributes) <= {
        "lang", "charset", "class", "id", "name", "content", "tabindex", "role", "aria-label", "scope",
    }  # fmt: skip  # nothing is loaded from elsewhere
    assert any(name in text for text in parser.text)


def test_html_holds_everything() -> None:
    model, sample = towers()
    report = explain(model, sample)
    page = report.to_html()
    parser = Balanced()
    parser.feed(page)
    text = "\n".join(parser.text)
    assert "4 collections: 3 convertible, 1 refused. NOT OK" in text
    for one in report.collections:
        for table in one.tables:
            assert table.name in text
        for step in one.passes:
            assert step.graph in text
    for heading in ("class", "found", "where"):  # of each; columns without a value are left out
        assert parser.text.count(heading) >= len(report.collections)
    for reason in report.reasons:
        assert reason.code in text
        assert reason.message in text
