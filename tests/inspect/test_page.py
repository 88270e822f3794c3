"""The report's page in a browser: what is too wide or too long scrolls by itself, and nothing is said twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

import recfx
from recfx import HashConfig
from tests.inspect.models import STRANGE, Towers, collection, strange_names
from tests.support.browser import Page


def opened(page: Page, model: nn.Module, tmp_path: Path) -> Page:
    path = tmp_path / "report.html"
    path.write_text(recfx.explain(model).to_html(), encoding="utf-8")
    page.open(path, ready="document.readyState === 'complete'")
    return page


def test_everything_is_there_and_nothing_is_asked_for(page: Page, tmp_path: Path) -> None:
    opened(page, Towers(), tmp_path)
    shown = page.run("document.body.innerText")
    assert "4 collections: 3 convertible, 1 refused. NOT OK" in shown
    assert shown.index("own_forward") < shown.index("sequence")  # what matters comes first
    assert page.run("document.querySelectorAll('th:not([scope])').length") == 0
    empty = "[...document.querySelectorAll('table')].filter((table) => [...table.rows[0].cells].some((_, place) => "
    assert page.run(f"{empty} [...table.rows].slice(1).every((row) => !row.cells[place].textContent))).length") == 0
    assert page.complaints == []
    assert page.requests == [(tmp_path / "report.html").resolve().as_uri()]


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


def test_many_tables_do_not_make_a_long_page(page: Page, tmp_path: Path) -> None:
    opened(page, recfx.convert(nn.ModuleDict({"ebc": collection(300)}), hashing=HashConfig(dense_rows=0)), tmp_path)
    assert "in 1 group of like ones (each is listed below)" in page.run("document.body.innerText")
    page.run("document.querySelectorAll('body > details').forEach((each) => { each.open = true; })")
    assert page.run("document.documentElement.scrollHeight") < 6000
    top = "document.querySelector('details th').getBoundingClientRect().top"
    before = page.run(top)
    box = "[...document.querySelectorAll('details .scroll')].find((each) => each.scrollHeight > each.clientHeight)"
    page.run(f"{box}.scrollTop = 500")
    assert page.run(f"{box}.scrollTop") == 500
    assert page.run(top) == before  # the names of the columns stay
    assert "t299" in page.run(f"{box}.textContent")
    assert page.run("document.querySelectorAll('tr.warning details').length") == 0  # it says all tables at once
