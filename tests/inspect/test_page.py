"""The report's page in a browser: what is too wide or too long scrolls by itself, and nothing is said twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

import recfx
from recfx import HashConfig
from recfx.exporter.report import TableSize
from recfx.planner.pricing.hardware import H100
from recfx.planner.topology import npu_topology
from recfx.verification.verify_report import Check
from tests.inspect.models import STRANGE, strange_names
from tests.support.browser import Page


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


def shown_in_notebooks(tmp_path: Path) -> list[object]:
    model = strange_names()[0]
    cost = recfx.cost(model, H100)
    converted = recfx.convert(model, hashing=HashConfig(dense_rows=0))
    plan = recfx.plan(model, npu_topology(2))
    compared = recfx.compare_plans(model, {"<i>one</i>": plan})
    checks = (Check("train", "sample", "outputs", "<i>0</i>", "different", 1.0, "<i>far</i>"),)
    verified = recfx.VerifyReport(checks, {"<i>e</i>": {STRANGE[0]: {"output": 1.0}}})
    exported = TableSize("<i>e</i>", STRANGE[0], "int8", 9, 0, 1, 0, 2, 0.5)
    written = recfx.ExportReport(Path("<i>m</i>.pt"), "pt2", 10, (exported,), "", {}, 0.5)
    return [recfx.explain(converted), cost.at(512), compared, cost.sweep([1]), verified, written]


@pytest.mark.parametrize("dark", [False, True])
def test_notebooks_show_tables_in_their_own_colours(page: Page, dark: bool, tmp_path: Path) -> None:
    objects = shown_in_notebooks(tmp_path)
    colours = "color: #eee; background: #111" if dark else "color: #111; background: #fff"
    path = tmp_path / "notebook.html"
    inside = "".join(shown._repr_html_() for shown in objects)
    path.write_text(f"<meta charset=utf-8><body style='{colours}'>{inside}</body>", encoding="utf-8")
    page.show(width=375, height=900, dark=not dark)  # the notebook's colours count, not the system's
    page.open(path, ready="document.readyState === 'complete'")
    assert page.run("document.querySelectorAll('.recfx table').length") >= len(objects)
    assert page.run("document.querySelectorAll('script, img, i').length") == 0
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    text = "getComputedStyle(document.querySelector('.recfx td.number')).color"
    assert page.run(text) == ("rgb(238, 238, 238)" if dark else "rgb(17, 17, 17)")
    assert page.complaints == []
    for shown in objects:
        assert re.fullmatch(rf"{type(shown).__name__}\(.{{,150}}\)", repr(shown))
