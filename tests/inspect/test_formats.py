"""The report as JSON and HTML."""

from __future__ import annotations

import dataclasses
import html
import json
import re

from torch import nn

from recfx import HashConfig, convert
from recfx.inspect.explain import explain
from recfx.inspect.report import REPORT_VERSION
from tests.inspect.models import collection, dlrm, towers


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


def text_of(page: str) -> str:
    """What a reader sees, without what is between angle brackets."""
    return html.unescape(re.sub(r"<[^>]*>", "\n", page))


def test_html_is_one_escaped_page() -> None:
    name = "<script>alert('x')</script>&\""
    page = explain(nn.ModuleDict({name.replace(".", ""): collection(1)})).to_html()
    assert page.startswith("<!DOCTYPE html>")
    assert "<script" not in page
    assert not re.search(r"<[^>]* (src|href|on\w+|style)=", page)  # nothing is loaded from elsewhere, and nothing runs
    assert name in text_of(page)


def test_html_holds_everything() -> None:
    model, sample = towers()
    report = explain(model, sample)
    text = text_of(report.to_html())
    assert "4 collections: 3 convertible, 1 refused. NOT OK" in text
    names = [table.name for one in report.collections for table in one.tables]
    assert {*names, *(node.name for one in report.collections for node in one.nodes)} <= {*text.split("\n")}
    for reason in report.reasons:
        assert reason.code in text
        assert reason.message in text
