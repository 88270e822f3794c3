"""Costs in the page: the numbers for what a user types are those of recfx.cost."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import recfx
from recfx.errors.grid import size
from recfx.inspect.drawing.costs import AMOUNTS, TIME
from recfx.planner.pricing.hardware import CPU_HOST, H100
from recfx.planner.topology import npu_topology
from recfx.versions.differences import make_topology
from tests.drawing import picture
from tests.drawing.open_page import AFTER, RAW, opened, shown_costs, texts, whole
from tests.drawing.page_data import data_of
from tests.inspect.models import Towers, batch, collection, dlrm
from tests.support.browser import Page
from tests.support.fake_group import fake_group


def type_into(page: Page, field: str, text: str) -> None:
    page.run(f"document.getElementById('{field}').select()")
    page.type(text)


def costs_at(node: Any) -> dict[str, float]:
    amounts = {name: getattr(node, attribute) for attribute, name in AMOUNTS.items()}
    return {name: pytest.approx(value) for name, value in amounts.items() if value}


@pytest.mark.parametrize("fused", [False, True])
def test_costs_in_numbers(fused: bool, page: Page, tmp_path: Path) -> None:
    model, sample = dlrm()
    if fused:  # a step touches at most as many rows as a table has
        bags = model.sparse_arch.embedding_bag_collection
        apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.1})
    model = recfx.convert(model, sample, hashing=RAW, verify=False)
    opened(page, model, tmp_path)
    assert ('"min"' in json.dumps(data_of(tmp_path / "model.html")["costs"])) is fused
    page.click(AFTER.format("hash_lookup"))
    for samples, length, lengths in ((512, "1", 1), (64, "2.5", 2.5), (7, "3, f1=0.5", {"f0": 3, "f1": 0.5})):
        type_into(page, "batch", str(samples))
        type_into(page, "length", length)
        priced = recfx.cost(model).at(B=samples, L=lengths)
        (lookup,) = (node for node in priced.nodes if node.kind == "hash_lookup")
        assert shown_costs(page) == costs_at(lookup)
        total = size(priced.totals.read_bytes)
        (told,) = texts(page, "#cost-total")
        assert told.startswith(f"One training step of the whole model, B={samples}, L: {length}: ")
        assert f"predicted for {priced.hardware.label}, {total} read, " in told
    page.click("#details-body button")  # the collection: the sum
    assert shown_costs(page)["bytes read"] == sum(node.read_bytes for node in priced.nodes if node.kind != "dense")
    assert page.complaints == []


def test_a_page_starts_from_the_sample(page: Page, tmp_path: Path) -> None:
    model, sample = dlrm()
    model = recfx.convert(model, hashing=RAW, verify=False)
    recfx.draw(model, tmp_path / "model.html", H100, sample=sample)
    page.open(tmp_path / "model.html")
    page.click(AFTER.format("hash_ids"))
    (lookup,) = (node for node in recfx.cost(model, H100, sample=sample).at().nodes if node.kind == "hash_ids")
    assert shown_costs(page) == costs_at(lookup)
    assert page.run("document.getElementById('batch').value") == "2"
    assert page.run("document.getElementById('length').value") == "1, f0=2, f1=2"


def test_numbers_that_are_none(page: Page, tmp_path: Path) -> None:
    opened(page, whole(), tmp_path)
    page.click(AFTER.format("hash_lookup"))
    before = shown_costs(page)
    for field, wrong in (("length", "2, absent=3"), ("length", "two"), ("length", "-1"), ("batch", "0")):
        type_into(page, field, wrong)
        assert page.run(f"document.getElementById('{field}').getAttribute('aria-invalid')") == "true"
        assert shown_costs(page) == before
        type_into(page, field, "512" if field == "batch" else "1")
        assert page.run(f"document.getElementById('{field}').getAttribute('aria-invalid')") == "false"
    assert page.complaints == []


def test_costs_of_a_sharded_model_are_those_of_its_ranks(page: Page, tmp_path: Path) -> None:
    with fake_group(3, picture.RANKS):
        model = picture.sharded()
        opened(page, model, tmp_path)
        priced = recfx.cost(model, H100).at(B=100, L=2)
    type_into(page, "batch", "100")
    type_into(page, "length", "2")
    assert texts(page, "#ranks") == ["W = 8 ranks"]
    for node in priced.nodes:
        if node.kind == "dense":
            continue
        page.run(f"[...document.querySelectorAll('#list button')].find((e) => e.textContent === '{node.name}').click()")
        assert texts(page, "#details-title") == [node.name]
        assert shown_costs(page) == costs_at(node)
    assert page.complaints == []


@pytest.mark.parametrize(("device", "lengths"), [("cpu", "1"), ("cpu", "2.5"), ("cuda", "30, f1=0"), ("npu", "3")])
def test_times_of_a_planned_model(device: str, lengths: str, page: Page, tmp_path: Path) -> None:
    model, _ = dlrm()
    topology = npu_topology(16) if device == "npu" else make_topology(16, device)
    recfx.draw(model, tmp_path / "model.html", topology)
    page.open(tmp_path / "model.html")
    type_into(page, "batch", "96")
    type_into(page, "length", lengths)
    mean = float(lengths.partition(",")[0])
    priced = recfx.cost(model, topology).at(B=96, L={"f0": mean, "f1": 0 if "," in lengths else mean})
    seen = 0
    for node in priced.nodes:
        if node.kind == "dense":
            continue
        page.run(
            f"[...document.querySelectorAll('#list button')].find((e) => e.textContent === '{node.name}')?.click()"
        )
        if texts(page, "#details-title") == [node.name]:  # a device's own nodes are not drawn
            seen += 1
            assert abs(shown_costs(page, time=True).get(TIME, 0.0) - node.seconds) < 1e-6  # as many places are shown
    assert seen >= 5
    total = texts(page, "#cost-total")[0]
    assert f"predicted for {priced.hardware.label}" in total
    assert "on this rank, without waiting for others" in total
    assert page.complaints == []


def test_bars_and_colours_compare_nodes(page: Page, tmp_path: Path) -> None:
    model = whole()
    opened(page, model, tmp_path)
    at = recfx.cost(model, CPU_HOST).at()
    costliest = max(at.nodes, key=lambda node: node.seconds)
    assert texts(page, "#details-title") == [costliest.name]
    measures = {
        "time": lambda node: node.seconds,
        "moved": lambda node: node.read_bytes + node.written_bytes,
        "kept": lambda node: node.resident_bytes,
    }
    assert page.run("[...document.getElementById('colour').options].map((each) => each.value)") == ["stage", *measures]
    for colour, value in measures.items():
        page.run(f"byId('colour').value = '{colour}', byId('colour').dispatchEvent(new Event('change'))")
        shares = page.run(
            "Object.fromEntries([...views.after.costs.keys()].map((key) => [views.after.boxes.get(key).nodes[0].name, "
            "views.after.elements.get(key)]).map(([name, shape]) => [name, shape.querySelector('.filled')"
            ".width.baseVal.value / shape.querySelector('.bar').width.baseVal.value]))"
        )
        largest = max(map(value, at.nodes))
        assert shares == {node.name: pytest.approx(value(node) / largest, abs=1e-4) for node in at.nodes}
        fills = page.run("[...document.querySelectorAll('#after .node path')].map((e) => getComputedStyle(e).fill)")
        assert len(set(fills)) > 3
    assert page.run("document.querySelectorAll('#before .bar').length") == 0
    assert page.run("byId('heat').clientWidth") == 0  # there is but one rank
    page.click("#step-back")
    assert page.run("document.querySelectorAll('#after .bar').length") == 0  # costs are those of the last graph
    assert page.complaints == []


def test_a_name_that_is_not_python_has_its_cost_in_the_graph_of_the_model(page: Page, tmp_path: Path) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleDict({"my-tower": collection(), "2nd": collection()})

        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return sum(tower(features).values() for tower in self.towers.values())

    sample = (batch([1, 2, 3, 4]),)
    model = recfx.convert(Towers(), sample, hashing=RAW, verify=False, whole_graph=True)
    opened(page, model, tmp_path)
    page.click(AFTER.format("towers_my_tower_hash_lookup"))
    assert texts(page, "#details-title") == ["towers_my_tower_hash_lookup"]
    assert shown_costs(page)["bytes read"] > 0


def test_a_model_that_is_not_converted_has_no_cost(page: Page, tmp_path: Path) -> None:
    opened(page, Towers(), tmp_path)
    assert page.run("getComputedStyle(document.getElementById('cost-control')).display") == "none"
