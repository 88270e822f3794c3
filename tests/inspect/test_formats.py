"""The report as JSON and HTML."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from recfx import ExportReport, HashConfig, Sample, VerifyReport, convert, cost
from recfx.exporter.load import LoadedModel
from recfx.exporter.report import TableSize
from recfx.inspect import (
    REPORT_VERSION,
    CollectionReport,
    TableReport,
)
from recfx.inspect.explain import explain
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


def test_json_is_complete_and_the_same_every_time() -> None:
    model, sample = dlrm()
    report = explain(convert(model, sample, hashing=HashConfig(dense_rows=0)))
    assert report.to_json() == explain(convert(model, sample, hashing=HashConfig(dense_rows=0))).to_json()
    parsed = json.loads(report.to_json())
    assert (parsed["version"], parsed["ok"], parsed["verification"]["ok"]) == (REPORT_VERSION, True, True)
    assert [*parsed] == [field.name for field in dataclasses.fields(report)]
    (one,) = parsed["collections"]
    assert one["paths"] == ["sparse_arch.embedding_bag_collection"]
    assert one["tables"][0]["hashing"]["counters"]["ids_seen"] == 0
    assert (one["nodes"][2]["shape"], one["nodes"][2]["bytes"]) == (["B", "16"], "64*B")
    assert {"code", "path", "message", "what_to_do", "severity"} <= {*parsed["reasons"][0]}


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
    parser = Balanced()
    parser.feed(report.to_html("model.html"))
    text = "\n".join(parser.text)
    assert "4 collections: 3 convertible, 1 refused. NOT OK" in text
    names = [table.name for one in report.collections for table in one.tables]
    assert {*names, *(node.name for one in report.collections for node in one.nodes)} <= {*parser.text}
    for reason in report.reasons:
        assert reason.code in text
        assert reason.message in text
