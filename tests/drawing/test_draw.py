"""What is drawn of which model, and what is refused."""

import copy
import html
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import recfx
from recfx import HashConfig
from recfx.inspect.drawing.costs import TIME, costs_of
from recfx.planner.pricing.hardware import CPU_HOST, H100
from tests.builders.collections import sequences
from tests.drawing.page_data import data_of
from tests.inspect.models import Towers, batch, dlrm
from tests.support.refusals import refused

RAW = HashConfig(dense_rows=0)
COLLECTION = "sparse_arch.embedding_bag_collection"


def converted() -> nn.Module:
    model, sample = dlrm()
    return recfx.convert(model, sample, hashing=RAW, verify=False)


def whole() -> nn.Module:
    model, sample = dlrm()
    return recfx.convert(model, sample, hashing=RAW, verify=False, whole_graph=True)


def traced() -> fx.GraphModule:
    return recfx.trace(converted(), dlrm()[1])


def drawn(model: nn.Module, folder: Path) -> Any:
    recfx.draw(model, folder / "model.html")
    return data_of(folder / "model.html")


def nodes_of(data: Any, collection: int, step: int = -1) -> list[dict[str, Any]]:
    """The nodes of a collection after a step."""
    return [data["nodes"][place] for place in data["collections"][collection]["steps"][step]["nodes"]]


def of_collections(data: Any) -> list[tuple[str, list[str], int]]:
    return [(one["was"], list(one["paths"]), len(one["tables"])) for one in data["collections"]]


@pytest.mark.parametrize("make", [converted, whole, traced], ids=lambda make: make.__name__)
def test_before_and_after_of_a_converted_model(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    data = drawn(make(), tmp_path)
    assert of_collections(data) == [("EmbeddingBagCollection", [COLLECTION], 2)]
    (lookup,) = (node for node in nodes_of(data, 0) if node["kind"] == "hash_lookup")
    assert (lookup["kernel"], len(lookup["tables"]), lookup["shape"]) == ("cpu", 2, "[B, 16]")
    outer = " ".join(data["nodes"][place]["name"] for place in data["outer"])
    assert ("inter_arch" in outer and "dense_features" in outer) is (make in (whole, traced))


def test_a_notebook_shows_the_page_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = converted()
    frame = recfx.draw(model)._repr_html_()
    assert list(tmp_path.iterdir()) == []
    assert frame.startswith("<iframe title=")
    (shown,) = re.findall('srcdoc="([^"]*)"', frame)
    assert html.unescape(shown) == recfx.draw(model, "model.html").read_text(encoding="utf-8")


def test_a_model_that_is_not_converted_is_drawn_as_it_is(tmp_path: Path) -> None:
    data = drawn(Towers(), tmp_path)
    assert data["steps"] == ["before"]
    classes = {tuple(paths): (was, tables) for was, paths, tables in of_collections(data)}
    assert classes["user", "item"] == ("EmbeddingBagCollection", 2)
    assert classes["own",] == ("OwnForward", 1)
    assert classes["sequence",] == ("EmbeddingCollection", 1)


def test_what_is_kept_is_marked_and_a_traced_model_has_its_name(tmp_path: Path) -> None:
    data = drawn(recfx.trace(Towers(), (batch([1, 2, 3, 4]),)), tmp_path)
    assert data["title"] == "Towers"
    assert [one["paths"] for one in data["collections"] if not one["steps"]] == [["own"]]


def test_rows_that_are_not_pooled_have_their_shape_and_type(tmp_path: Path) -> None:
    (one,) = drawn(recfx.convert(sequences()), tmp_path)["collections"]
    assert (one["gives"], one["shape"]) == ("JaggedTensors", "[B*(L_f1 + L_f2 + L_f3), 8]")


def test_drawing_changes_nothing(tmp_path: Path) -> None:
    model = converted()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    text = str(recfx.explain(model))
    recfx.draw(model, tmp_path / "model.html")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert str(recfx.explain(model)) == text


def test_only_passes_of_the_mode_that_the_model_is_in_are_drawn(tmp_path: Path) -> None:
    model = converted()
    records = model.get_submodule(COLLECTION).pass_records
    assert isinstance(records, list)
    records.append(replace(records[-1], name="find_on_device"))  # of the graph of eval mode, if it is another one
    assert recfx.draw(model, str(tmp_path / "model.html")) == tmp_path / "model.html"
    assert data_of(tmp_path / "model.html")["steps"] == ["before", *(pass_.name for pass_ in recfx.passes())]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.svg", "unknown_ending"),
        ("model", "unknown_ending"),
        ("", "invalid_argument"),
        ("a\0b.html", "invalid_argument"),
        ("nowhere/model.html", "cannot_write"),
        ("nowhere/../model.html", "cannot_write"),
        ("folder.html", "cannot_write"),
    ],
)
def test_paths_that_cannot_be_written(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(recfx.DrawingError) as caught:
        recfx.draw(converted(), f"{tmp_path}/{name}" if name else "")
    assert caught.value.reason == reason
    assert caught.value.what_to_do
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_a_model_without_collections(tmp_path: Path) -> None:
    with refused("no_collection", error=recfx.DrawingError):
        recfx.draw(nn.Linear(2, 2), tmp_path / "model.html")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_and_a_link_stays(tmp_path: Path) -> None:
    (tmp_path / "model.html").write_text("old")
    os.symlink("model.html", tmp_path / "link.html")
    recfx.draw(converted(), tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "model.html").read_text().startswith("<!DOCTYPE html>")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "model.html").stat().st_mode) == 0o666 & ~mask
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "model.html"]


def test_every_node_that_takes_time_says_so() -> None:
    model = recfx.convert(dlrm()[0], verify=False)
    predicted = [node.seconds > 0 for node in recfx.cost(model, H100).at().nodes]
    costs = costs_of(model, H100)
    assert [
        TIME in [name for name, _, _ in amounts] for amounts in map(costs.amounts_of, costs.cost.nodes)
    ] == predicted
    assert costs_of(model).cost.hardware == CPU_HOST
