"""The report as text, HTML and JSON: what matters first, readable and fast for large models, complete, escaped."""

import dataclasses
import html
import json
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx import HashConfig, convert
from recfx.inspect.explain import explain
from recfx.inspect.report import REPORT_VERSION, Report, sections
from tests.builders.optimizers import attach
from tests.inspect.models import STRANGE, Wrapped, collection, config, dlrm, strange_names, towers
from tests.support.browser import Page


def small_report() -> Report:
    model, sample = towers()
    converted = convert(model, sample, hashing={"t1": HashConfig(dense_rows=0)}, on_unsupported="keep", verify=False)
    converted(*sample)
    return explain(converted)


def test_what_matters_comes_first() -> None:
    text = str(small_report())
    parts = ("NOT OK", "own_forward: own", "never_called: unused", "Indexes", "Collections", "Tables", "Nodes")
    places = [text.index(part) for part in (*parts, "weights_not_used: user.embedding_bags.t1")]
    assert places == sorted(places)
    assert text.isascii()  # also in a log that knows nothing else
    assert "\x1b" not in text
    assert "tests/inspect/models.py:" in text
    assert "site-packages" not in str(explain(collection()))


def test_a_thousand_tables() -> None:
    model = convert(
        EmbeddingBagCollection(tables=[config(number) for number in range(1000)]), hashing=HashConfig.raw_ids()
    )
    started = time.process_time()
    report = explain(model)
    explained = time.process_time()
    text, page = str(report), report.to_html()
    report.to_json()
    assert explained - started < 2.0
    assert time.process_time() - explained < 6.0
    assert len(text.splitlines()) < 60
    assert "... and 980 more" in text
    assert text.count("the table starts anew") == page.count("the table starts anew") == 1  # one reason for all
    assert "<td>t999</td>" in page


def test_the_fullest_index_is_the_first() -> None:
    model = Wrapped(collection(3))
    attach(model, torch.optim.SGD)
    converted = convert(model, hashing=HashConfig.raw_ids(buckets=1))
    features, lengths = [f"f{number}" for number in range(3)], torch.tensor([10, 90, 0])
    converted(KeyedJaggedTensor(features, torch.arange(100), lengths=lengths)).sum().backward()
    report = explain(converted)
    indexes = sections(report.collections)[0]
    assert [row[0] for row in indexes.rows][:2] == ["t1", "t0"]
    assert str(report).index("index_nearly_full") < str(report).index("Indexes")


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
    page = report.to_html()
    text = text_of(page)
    assert '<h1 class="error">' in page
    assert "4 collections: 3 convertible, 1 refused. NOT OK" in text
    names = [table.name for one in report.collections for table in one.tables]
    assert {*names, *(node.name for one in report.collections for node in one.nodes)} <= {*text.split("\n")}
    for reason in report.reasons:
        assert reason.code in text
        assert reason.message in text


def opened(page: Page, model: nn.Module, tmp_path: Path) -> Page:
    path = tmp_path / "report.html"
    path.write_text(recfx.explain(model).to_html(), encoding="utf-8")
    page.open(path, ready="document.readyState === 'complete'")
    return page


def test_names_are_never_markup(page: Page, tmp_path: Path) -> None:
    opened(page, strange_names()[0], tmp_path)
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    cells = page.run("[...document.querySelectorAll('td:first-child')].map((each) => each.textContent)")
    assert {name for name in STRANGE if name.isprintable()} < set(cells)
    assert {r"a\nb", r"esc\x1b[31m\x00", r"lone\udc80"} < set(cells)
    assert page.run("document.querySelectorAll('script, img').length") == 0
    assert page.complaints == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [420, 1500])
def test_a_long_name_and_a_narrow_window(page: Page, width: int, dark: bool, tmp_path: Path) -> None:
    page.show(width=width, height=900, dark=dark)
    opened(page, recfx.convert(strange_names()[0], hashing=HashConfig(dense_rows=0)), tmp_path)
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    paper, ink = (
        sum(map(int, re.findall(r"\d+", page.run(f"getComputedStyle(document.body).{name}"))))
        for name in ("backgroundColor", "color")
    )
    assert (paper < ink) is dark
