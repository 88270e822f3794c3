"""The page in a browser: what is seen, what a click and a key do, and what is read out."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from torchrec import EmbeddingBagCollection, PoolingType

import recfx
from recfx.errors import printable
from tests.drawing import picture
from tests.drawing.open_page import AFTER, PREFIX, RAW, boxes, details, focused, many, opened, tables, texts, whole
from tests.drawing.page_data import data_of
from tests.inspect.models import STRANGE, Towers, collection, config, dlrm
from tests.support.browser import Page
from tests.support.fake_group import fake_group


def test_before_and_after_stand_side_by_side(page: Page, tmp_path: Path) -> None:
    opened(page, whole(), tmp_path)
    dense = ["dense_arch", "to_dict", "to_dict['f0']", "to_dict['f1']", "cat", "reshape", "inter_arch", "over_arch"]
    around = {"dense_features", "sparse_features", "output", *dense}
    assert set(boxes(page, "before")) == {"EmbeddingBagCollection", *around}
    made = {"select_features", "hash_lookup", "mean_divide", "keyed_tensor"}
    assert set(boxes(page)) == made | around
    assert "[B*(L_f0 + L_f1)]" in texts(page, "#after g.edge text")
    stages = page.run(
        "[...document.querySelectorAll('#after g.node')].map((e) => /stage-\\w+/.exec(e.className.baseVal)[0])"
    )
    assert {"stage-select", "stage-lookup", "stage-dense", "stage-io"} == set(stages)
    left, right = (
        page.run(f"document.getElementById('{side}').getBoundingClientRect().x") for side in ("before", "after")
    )
    assert left < right
    assert page.complaints == []
    assert page.requests == [(tmp_path / "model.html").resolve().as_uri()]  # nothing else, from nowhere


def test_a_clicked_node_tells_where_it_comes_from(page: Page, tmp_path: Path) -> None:
    model, sample = dlrm()
    opened(page, recfx.convert(model, sample, hashing=RAW, verify=False), tmp_path)
    page.click(AFTER.format("hash_lookup"))
    assert texts(page, "#details-title") == [f"{PREFIX}_hash_lookup"]
    shown = details(page)
    assert re.fullmatch(r"torchrec/models/dlrm\.py:\d+", shown["source"])
    assert shown["collection"] == "sparse_arch.embedding_bag_collection"
    assert shown["touched by"] == "expand_collection → insert_hash → batch_lookups → fuse_hash_lookup → lower"
    assert (shown["device"], shown["kernel"], shown["shape"]) == ("cpu", "cpu", "[B, 16]")
    assert shown["why"] == "cpu: the first that can serve these tables"
    assert {"bytes read", "bytes that stay in memory"} < set(texts(page, "#details .cost tbody th"))
    assert texts(page, "#details .scroll tbody tr td:first-child") == ["t0", "t1"]
    assert page.run("document.querySelectorAll('.selected').length") == 1
    page.click("#before g.node")
    assert details(page)["class"] == "HashEmbeddingBagCollection"
    assert details(page)["tables"] == "2"
    assert page.complaints == []


def test_the_slider_steps_through_the_passes(page: Page, tmp_path: Path) -> None:
    opened(page, whole(), tmp_path)
    names = ["before", *(pass_.name for pass_ in recfx.passes())]
    page.run("document.getElementById('step').focus()")
    assert texts(page, "#step-name") == [f"lower ({len(names) - 1} of {len(names) - 1})"]
    seen = {}
    for place in reversed(range(len(names) - 1)):
        page.press("ArrowLeft")
        assert page.run("document.getElementById('step').getAttribute('aria-valuetext')").startswith(names[place])
        seen[names[place]] = set(boxes(page))
    assert "EmbeddingBagCollection" in seen["before"]
    assert {"select_features", "lookup", "keyed_tensor"} <= seen["expand_collection"]
    assert "hash_ids" in seen["insert_hash"] - seen["expand_collection"]
    assert page.run("document.getElementById('step-back').disabled") is True
    page.click("#step-on")
    assert texts(page, "#after-caption") == ["After expand_collection"]
    assert "expand_collection changed 1 collection" in texts(page, "#status")[0]
    assert page.run("document.querySelectorAll('#after .touched').length") == 4
    assert page.complaints == []


def test_any_name_of_a_collection(page: Page, tmp_path: Path) -> None:
    names = [name.replace(".", "") for name in (*STRANGE, "\\N", "a\\", "&amp;", "#x", "%s", "x;y")]
    opened(page, recfx.convert(nn.ModuleDict({name: collection() for name in names}), hashing=RAW), tmp_path)
    page.click("#collapse-all")
    readable, shown = list(map(printable, names)), texts(page, "#after g.node text:first-of-type")
    assert len(shown) == len(names)
    for number, label in enumerate(shown):
        (name,) = (one for one in readable if one == label or (one[:50] == label[:50] and len(label) == 60))
        page.run(f"document.querySelectorAll('#after g.node')[{number}].dispatchEvent(new MouseEvent('click'))")
        assert texts(page, "#details-title") == [name]
    assert page.complaints == []


def test_search_finds_tables_and_features(page: Page, tmp_path: Path) -> None:
    opened(page, many(), tmp_path)
    page.run("document.getElementById('search').focus()")
    page.type("f123")
    assert texts(page, "#results li") == ["feature f123: table t123 in c12"]
    assert texts(page, "#search-count") == ["1 match"]
    assert page.run("document.querySelectorAll('#after .found').length") == 1
    page.click("#results button")
    assert "hash_lookup" in boxes(page)  # its collection is not collapsed any more
    assert texts(page, "#details-title") == ["c12_hash_lookup"]
    assert texts(page, "#details tr.found td:first-child") == ["t123"]
    assert focused(page).startswith("hash_lookup")
    assert texts(page, "#results li") == []  # it lies above the graph, and has been used
    page.run("document.getElementById('search').select()")
    page.type("no such thing")
    assert (texts(page, "#results li"), texts(page, "#search-count")) == ([], ["Nothing found"])
    assert page.complaints == []


def test_collections_collapse(page: Page, tmp_path: Path) -> None:
    opened(page, many(), tmp_path)
    assert len(boxes(page)) == len(boxes(page, "before")) == 50  # 500 tables, collapsed at first
    page.click(AFTER.format("c7,"))
    assert details(page)["tables"] == "10"
    assert texts(page, "#details-body button")[0] == "Expand"
    page.click("#details-body button")
    assert len(boxes(page)) == 49 + 5
    page.click(AFTER.format("select_features"))
    page.click("#details-body button")
    assert texts(page, "#details-title") == ["c7"]
    assert len(boxes(page)) == 50
    page.click("#expand-all")
    assert len(boxes(page)) == 50 * 5
    width, height = page.run(
        "(({ width, height }) => [width, height])(document.querySelector('#after svg').viewBox.baseVal)"
    )
    assert 1 / 3 < width / height < 3
    page.click("#collapse-all")
    assert len(boxes(page)) == 50
    assert page.complaints == []


def test_many_like_nodes_are_one_stack(page: Page, tmp_path: Path) -> None:
    opened(page, recfx.convert(nn.ModuleDict({"only": tables(0, 500)}), hashing=RAW), tmp_path)
    page.run("goTo(data.steps.indexOf('insert_hash'))")
    assert "▸ 500 x lookup" in boxes(page)
    page.click(AFTER.format("500 x lookup"))
    assert texts(page, "#details-title") == ["500 nodes: lookup"]
    assert texts(page, "#details ul button")[:2] == ["only_lookup", "only_lookup_1"]
    page.click("#details ul li:nth-of-type(2) button")
    assert texts(page, "#details-title") == ["only_lookup_1"]
    assert texts(page, "#details tbody td:first-child") == ["t1"]
    assert page.complaints == []


def test_all_of_it_works_with_the_keyboard(page: Page, tmp_path: Path) -> None:
    opened(page, whole(), tmp_path)
    order = []
    for _ in range(16):
        page.press("Tab")
        order.append(focused(page))
    expected = ["collapse-all", "expand-all", "Zoom out", "Zoom in", "zoom-fit", "Previous pass", "step", "search"]
    assert [stop for stop in order if stop in expected] == expected
    assert page.run("document.querySelectorAll('#after [tabindex=\"0\"]').length") == 1  # one stop; arrows go on
    page.run("document.querySelector(\"#after [aria-label*='select_features']\").focus()")
    page.press("ArrowDown")
    page.press("ArrowDown")
    assert focused(page).startswith("mean_divide")
    page.press("ArrowUp")
    assert not focused(page).startswith("mean_divide")
    page.run("document.querySelector(\"#after [aria-label*='hash_lookup']\").focus()")
    page.press("Enter")
    assert texts(page, "#details-title") == [f"{PREFIX}_hash_lookup"]
    assert focused(page) == "details"
    page.press("Escape")
    assert focused(page).startswith("hash_lookup")
    assert page.complaints == []


def test_a_screen_reader_is_told_everything(page: Page, tmp_path: Path) -> None:
    opened(page, whole(), tmp_path)
    page.call("Accessibility.enable")
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    heard = [
        (node["role"]["value"], node["name"]["value"])
        for node in tree
        if not node["ignored"] and node.get("role") and node.get("name")
    ]
    assert [role for role, name in heard if role in ("button", "slider", "searchbox", "region") and not name] == []
    buttons = [name for role, name in heard if role in ("button", "ToggleButton")]
    lookup = f"hash_lookup, 2 tables, kernel cpu, shape [B, 16], {PREFIX}_hash_lookup"
    (told,) = (name for name in buttons if name.startswith(lookup))
    assert re.fullmatch(r", [\d.]+ µs, \d+% of the predicted time", told.removeprefix(lookup))
    assert ("slider", "Graph after pass") in heard
    assert ("searchbox", "Find a table, feature or node") in heard
    assert ("region", f"{PREFIX}_hash_lookup") in heard  # it costs most, so it is shown at first
    assert ("heading", "The same graph as a list") in heard
    assert f"{PREFIX}_mean_divide" in buttons  # in the list
    assert page.run("document.documentElement.lang") == "en"


def test_whole_graphs_are_seen_and_labels_are_inside_borders(page: Page, tmp_path: Path) -> None:
    three = nn.ModuleDict({f"tower_{number}": tables(50 * number, 10 * (number + 1)) for number in range(3)})
    opened(page, recfx.convert(three, hashing=RAW), tmp_path)
    inside = """(inner, outer) => [...document.querySelectorAll(inner)].filter((each) =>
        [...document.querySelectorAll(outer)].some((around) => {
            const [a, b] = [each, around].map((one) => one.getBoundingClientRect());
            return a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;
        })).length"""
    for width in (1500, 2000, 375, 60):  # also while the window changes
        page.show(width=width, height=900)
        page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        for shown, around in (
            ("#before .node", "#before"),
            ("#after .node, #after .edge, #after .cluster", "#after"),
            ("#after .node text, #after .label text, #after .graph > text", "#after .cluster path"),
        )[: 3 if width > 60 else 2]:  # letters of less than a pixel take up more room
            count = page.run(f"document.querySelectorAll('{shown}').length")
            assert page.run(f"({inside})('{shown}', '{around}')") == count > 0, (width, shown)
        assert width == 60 or page.run("document.documentElement.scrollWidth <= innerWidth")
    assert len(texts(page, "#after .label")) == 9


def test_a_sharded_model(page: Page, tmp_path: Path) -> None:
    with fake_group(3, picture.RANKS):
        opened(page, picture.sharded(), tmp_path)
    assert "rank 3 of 8" in page.run("document.querySelector('header').textContent")
    shown = boxes(page)
    dist = ["bucketize", "input_dist_start", "input_dist_wait", "output_dist_start", "output_dist_wait"]
    assert set(shown) >= {"select_features", "hash_lookup", "keyed_tensor", *dist}
    assert {"ids_in_flight", "dist_context", "[B, 64]"} <= set(texts(page, "#after g.edge text"))
    page.click("#after [aria-label*='input_dist_start']")
    shown = details(page)
    assert "all_to_all" in shown["sends"]
    assert shown["stage"] == "dist: between ranks"
    assert "bytes sent" in texts(page, "#details .cost tbody th")
    assert shown["touched by"] == "insert_dist"
    assert "tests/builders/models.py:" in shown["source"]
    page.run("goTo(data.steps.indexOf('insert_dist'))")
    page.click("#after [aria-label*='lookup, 1 table']")
    assert details(page)["touched by"] == "expand_collection → insert_dist"
    assert page.complaints == []


def test_a_model_that_is_not_converted(page: Page, tmp_path: Path) -> None:
    opened(page, Towers(), tmp_path)
    assert set(boxes(page, "before")) == {"EmbeddingBagCollection", "OwnForward", "EmbeddingCollection"}
    assert page.run("getComputedStyle(document.getElementById('after-figure')).display") == "none"
    assert page.run("getComputedStyle(document.getElementById('step-control')).display") == "none"
    page.click("#before [aria-label*='own']")
    assert "own_forward" in details(page)["why"]
    assert "tests/inspect/models.py:" in details(page)["source"]
    page.click("#before [aria-label*='user']")
    assert details(page)["names"] == "useritem"
    assert page.complaints == []


def test_names_are_never_markup(page: Page, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)><b>"
    named = EmbeddingBagCollection([config(0), config(1, pooling=PoolingType.MEAN)])
    named.embedding_bag_configs()[0].feature_names[0] = evil
    opened(page, recfx.convert(nn.ModuleDict({evil.replace(".", "_"): named})), tmp_path)
    page.run("document.getElementById('search').focus()")
    page.type("img")
    page.click("#results button")
    assert evil in " ".join(texts(page, "#details td"))
    assert page.run("document.querySelectorAll('img, b').length") == 0
    assert page.complaints == []
    assert len(page.requests) == 1


@pytest.mark.parametrize("collections", [1, 50])
def test_a_page_of_1000_tables_is_small(collections: int, tmp_path: Path) -> None:
    count = 1000 // collections
    model = nn.ModuleDict({f"c{number}": tables(count * number, count) for number in range(collections)})
    recfx.draw(recfx.convert(model, hashing=RAW), tmp_path / "model.html")
    assert (tmp_path / "model.html").stat().st_size < 2_500_000
    data = data_of(tmp_path / "model.html")
    names = itertools.chain.from_iterable(collection["tables"] for collection in data["collections"])
    assert [name for name, *_ in names] == [f"t{number}" for number in range(1000)]


def test_equal_models_give_equal_pages(tmp_path: Path) -> None:
    make: Callable[[], nn.Module] = whole
    for name in ("one", "other"):
        recfx.draw(make(), tmp_path / f"{name}.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "other.html").read_bytes()
