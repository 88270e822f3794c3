"""The report's page in a browser: what is too wide or too long scrolls by itself, and nothing is said twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

import recfx
from recfx import HashConfig
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
