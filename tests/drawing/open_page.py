"""What tests of the page draw, and what they ask an open page."""

import json
from pathlib import Path
from typing import Any

from torch import nn
from torchrec import EmbeddingBagCollection

import recfx
from recfx import HashConfig
from recfx.inspect.drawing.costs import TIME
from tests.inspect.models import config, dlrm
from tests.support.browser import Page

RAW = HashConfig(dense_rows=0)
PREFIX = "sparse_arch_embedding_bag_collection"
AFTER = "#after [aria-label*='{}']"


def tables(first: int, count: int, **more: Any) -> nn.Module:
    return EmbeddingBagCollection([config(first + number, rows=4, dim=4, **more) for number in range(count)])


def whole() -> nn.Module:
    model, sample = dlrm()
    return recfx.convert(model, sample, hashing=RAW, verify=False, whole_graph=True)


def many() -> nn.Module:
    """50 collections, 500 tables."""
    return recfx.convert(nn.ModuleDict({f"c{number}": tables(10 * number, 10) for number in range(50)}), hashing=RAW)


def opened(page: Page, model: nn.Module, tmp_path: Path) -> Page:
    recfx.draw(model, tmp_path / "model.html")
    page.open(tmp_path / "model.html")
    return page


def texts(page: Page, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent.trim())")


def boxes(page: Page, side: str = "after") -> list[str]:
    """The first line of each box."""
    return texts(page, f"#{side} g.node text:first-of-type")


def details(page: Page) -> dict[str, str]:
    names, values = texts(page, "#details dt"), texts(page, "#details dd")
    return dict(zip(names, values, strict=True))


def shown_costs(page: Page, time: bool = False) -> dict[str, float]:
    """The exact numbers of the open panel, with or without the predicted time."""
    names = texts(page, "#details .cost tbody th")
    numbers = page.run("[...document.querySelectorAll('#details .cost td.number')].map((each) => each.title)")
    exact = {name: float(number.replace(",", "")) for name, number in zip(names, numbers, strict=True)}
    return {name: number for name, number in exact.items() if time or name != TIME}


def focused(page: Page) -> str:
    return page.run("document.activeElement.getAttribute('aria-label') ?? document.activeElement.id")
