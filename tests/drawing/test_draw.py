"""What is drawn of which model, and what is refused."""

from __future__ import annotations

import copy
import html
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torchrec import EmbeddingBagCollection

import recfx
from recfx import HashConfig
from tests.builders.batches import batch as small_batch
from tests.builders.collections import sequences
from tests.drawing.page_data import data_of
from tests.inspect.models import Towers, Wrapped, batch, collection, config, dlrm
from tests.models import ZOO, Case
from tests.models.sequences import SequenceTower

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


def of_collection() -> fx.GraphModule:
    graph = converted().get_submodule(COLLECTION).graph_module
    assert isinstance(graph, fx.GraphModule)
    return graph


def dot(model: nn.Module, folder: Path) -> str:
    recfx.draw(model, folder / "model.dot")
    return (folder / "model.dot").read_text()


@pytest.mark.parametrize("make", [converted, whole, traced, of_collection], ids=lambda make: make.__name__)
def test_before_and_after_of_a_converted_model(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    text = dot(make(), tmp_path)
    assert 'subgraph "cluster before"' in text
    was = "collection" if make is of_collection else "EmbeddingBagCollection"
    assert f'[label="{was}\\n{COLLECTION}\\n2 tables", fillcolor="#cdebd1"]' in text
    assert 'subgraph "cluster after"' in text
    assert 'label="hash_lookup\\n2 tables\\nkernel cpu"' in text
    assert '[label="[B*(L_f0 + L_f1)]"];' in text
    around = "inter_arch" in text and "dense_features" in text
    assert around is (make in (whole, traced))


def test_a_notebook_shows_the_page_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = converted()
    frame = recfx.draw(model)._repr_html_()
    assert list(tmp_path.iterdir()) == []
    assert frame.startswith("<iframe title=")
    (shown,) = re.findall('srcdoc="([^"]*)"', frame)
    assert html.unescape(shown) == recfx.draw(model, "model.html").read_text(encoding="utf-8")


def test_a_model_that_is_not_converted_is_drawn_as_it_is(tmp_path: Path) -> None:
    text = dot(Towers(), tmp_path)
    assert "cluster after" not in text
    assert 'label="EmbeddingBagCollection\\nuser\\n2 tables"' in text
    assert 'label="OwnForward\\nown\\n1 table"' in text
    assert 'label="EmbeddingCollection\\nsequence\\n1 table"' in text


def test_what_is_kept_is_marked_and_a_traced_model_has_its_name(tmp_path: Path) -> None:
    text = dot(recfx.trace(Towers(), (batch([1, 2, 3, 4]),)), tmp_path)
    assert text.startswith('digraph "Towers" {')
    before, _, after = text.partition("cluster after")
    kept = '[label="OwnForward\\nown\\n1 table\\nkept as it is", fillcolor="#ffffff"]'
    assert kept in after
    assert "kept as it is" not in before
    assert after.count("kept as it is") == 1


def test_rows_that_are_not_pooled_have_their_shape_and_type(tmp_path: Path) -> None:
    rows = "[B*(L_f1 + L_f2 + L_f3), 8]"
    alone = dot(recfx.convert(sequences()), tmp_path)
    assert '[label="JaggedTensors"' in alone
    assert f'" -> "(root)/output" [label="{rows}"];' in alone or f'[label="{rows}"];' in alone
    assert "KeyedTensor" not in alone
    whole = recfx.convert(SequenceTower(), (small_batch(3),), verify=False, whole_graph=True)
    assert f'"before ec" -> "before getitem" [label="{rows}"];' in dot(whole, tmp_path)


def test_a_graph_of_a_model_that_is_not_converted(tmp_path: Path) -> None:
    class Leaves(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return name == "inner"

    model = Wrapped(collection())
    text = dot(fx.GraphModule(model, Leaves().trace(model)), tmp_path)
    assert '"before features" -> "before inner";' in text
    assert '"before inner" -> "before values" [label="[B, 16]"];' in text


def test_the_class_and_the_output_before_conversion_are_shown(tmp_path: Path) -> None:
    class Own(EmbeddingBagCollection):
        pass

    model = Wrapped(collection(kind=Own))
    text = dot(recfx.trace(recfx.convert(model), (batch([1, 2, 3, 4]),)), tmp_path)
    assert '"before inner" [label="Own\\ninner\\n2 tables"' in text
    assert '"before inner" -> "before values" [label="[B, 16]"];' in text
    built = recfx.HashEmbeddingBagCollection(
        [recfx.HashEmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4)]
    )
    assert 'label="HashEmbeddingBagCollection\\n(root)\\n1 table"' in dot(built, tmp_path)


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_every_model_of_the_zoo_can_be_drawn(case: Case, tmp_path: Path) -> None:
    with case.around():
        model, sample = case.model(), case.sample()
        paths = recfx.explain(model).collections
        text = dot(model, tmp_path)
        converted = recfx.convert(model, sample, verify=False, whole_graph=not case.whole_graph)
        after = dot(converted, tmp_path)
        recfx.draw(converted, tmp_path / "model.html")
    for source in paths:
        assert f"{source.path or '(root)'}\\n" in text
    assert "select_features" in after.partition("cluster after")[2]


def test_equal_models_give_equal_files(tmp_path: Path) -> None:
    assert dot(whole(), tmp_path) == dot(whole(), tmp_path)


def test_names_are_quoted(tmp_path: Path) -> None:
    model = nn.ModuleDict({'a"b\\n<script>&': collection()})
    text = dot(recfx.convert(model), tmp_path)
    assert 'label="a\\"b\\\\n<script>&"' in text


def test_drawing_changes_nothing(tmp_path: Path) -> None:
    model = converted()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    text = str(recfx.explain(model))
    for ending in ("dot", "html"):
        recfx.draw(model, tmp_path / f"model.{ending}")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert str(recfx.explain(model)) == text


def test_svg_is_what_graphviz_makes_of_the_dot_file(tmp_path: Path) -> None:
    recfx.draw(converted(), tmp_path / "model.svg")
    text = (tmp_path / "model.svg").read_text()
    assert text.startswith("<?xml")
    assert text.count('class="node"') == 1 + 6  # the collection before, four nodes after, its input and output
    assert "hash_lookup" in text
    assert "cluster" in text


def test_only_passes_of_the_mode_that_the_model_is_in_are_drawn(tmp_path: Path) -> None:
    model = converted()
    records = model.get_submodule(COLLECTION).pass_records
    assert isinstance(records, list)
    records.append(replace(records[-1], name="find_on_device"))  # of the graph of eval mode, if it is another one
    assert recfx.draw(model, str(tmp_path / "model.html")) == tmp_path / "model.html"
    assert data_of(tmp_path / "model.html")["steps"] == ["before", *(pass_.name for pass_ in recfx.passes())]


def test_svg_is_made_by_the_program_of_graphviz_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\ncat > /dev/null\necho '<svg/>'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    recfx.draw(converted(), tmp_path / "model.svg")
    assert (tmp_path / "model.svg").read_text() == "<svg/>\n"

    program.write_text("#!/bin/sh\ncat > /dev/null\necho 'out of luck' >&2\nexit 1\n")
    with pytest.raises(recfx.DrawingError, match="out of luck") as caught:
        recfx.draw(converted(), tmp_path / "model.svg")
    assert caught.value.reason == "graphviz_failed"
    assert "draw a .html or .dot file" in str(caught.value)

    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(recfx.DrawingError, match=r"install Graphviz .*\.html") as caught:
        recfx.draw(converted(), tmp_path / "model.svg")
    assert caught.value.reason == "no_graphviz"
    assert (tmp_path / "model.svg").read_text() == "<svg/>\n"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.png", "unknown_ending"),
        ("model", "unknown_ending"),
        ("", "invalid_argument"),
        ("a\0b.dot", "invalid_argument"),
        ("nowhere/model.dot", "cannot_write"),
        ("nowhere/../model.dot", "cannot_write"),
        ("folder.dot", "cannot_write"),
    ],
)
def test_paths_that_cannot_be_written(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "folder.dot").mkdir()
    with pytest.raises(recfx.DrawingError) as caught:
        recfx.draw(converted(), f"{tmp_path}/{name}" if name else "")
    assert caught.value.reason == reason
    assert caught.value.what_to_do
    assert [path.name for path in tmp_path.iterdir()] == ["folder.dot"]


def test_a_path_that_is_no_path() -> None:
    with pytest.raises(recfx.DrawingError) as caught:
        recfx.draw(converted(), 3)  # type: ignore[arg-type]
    assert caught.value.reason == "invalid_argument"


@pytest.mark.parametrize("ending", ["dot", "html", "svg"])
def test_a_model_without_collections(ending: str, tmp_path: Path) -> None:
    with pytest.raises(recfx.DrawingError) as caught:
        recfx.draw(nn.Linear(2, 2), tmp_path / f"model.{ending}")
    assert caught.value.reason == "no_collection"
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(recfx.ConversionError, match="model_or_graph is a str") as caught:
        recfx.draw("model", tmp_path / "model.dot")  # type: ignore[arg-type]
    assert caught.value.reason == "invalid_argument"


def test_a_file_is_replaced_and_a_link_stays(tmp_path: Path) -> None:
    (tmp_path / "model.dot").write_text("old")
    os.symlink("model.dot", tmp_path / "link.dot")
    recfx.draw(converted(), tmp_path / "link.dot")
    assert (tmp_path / "link.dot").is_symlink()
    assert (tmp_path / "model.dot").read_text().startswith("digraph")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "model.dot").stat().st_mode) == 0o666 & ~mask
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.dot", "model.dot"]


def test_many_tables_stay_readable(tmp_path: Path) -> None:
    many = recfx.convert(nn.ModuleDict({f"c{number}": tables(number, 10) for number in range(50)}), hashing=RAW)
    assert dot(many, tmp_path).count("fillcolor") == 50 + 50  # one box per collection, before and after
    one = recfx.convert(nn.ModuleDict({"only": tables(0, 500)}), hashing=RAW)
    assert dot(one, tmp_path).count("fillcolor") == 1 + 5


@pytest.mark.parametrize("count", [8, 50])
def test_many_collections_are_no_long_strip(count: int, tmp_path: Path) -> None:
    model = nn.ModuleDict({f"c{number}": tables(number, 2) for number in range(count)})
    recfx.draw(recfx.convert(model, hashing=RAW), tmp_path / "model.svg")
    size = re.search(r'<svg width="(\d+)pt" height="(\d+)pt"', (tmp_path / "model.svg").read_text())
    assert size is not None
    width, height = map(int, size.groups())
    assert 1 / 3 < width / height < 3


def tables(number: int, count: int) -> nn.Module:
    return EmbeddingBagCollection([config(number * count + place, rows=4, dim=4) for place in range(count)])
