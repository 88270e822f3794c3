"""Each node knows the line of the user's code that it comes from, and the passes that touched it."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

import recfx
from recfx import HashConfig
from recfx.inspect.drawing.collect import CALL, collect, source_text
from recfx.ir.meta import SourceLocation, node_meta
from tests.inspect.models import batch, collection, dlrm
from tests.passes.small_collection import ADOPTED, INDEXED
from tests.passes.small_collection import collection as small_collection

RAW = HashConfig(dense_rows=0)


def line_of(mark: str) -> SourceLocation:
    """The line of this file that ends in a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number_of_line,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {mark}")]
    return SourceLocation(__file__, number_of_line)


def definition_of(kind: type) -> SourceLocation:
    return SourceLocation(__file__, inspect.getsourcelines(kind)[1])


class Inner(nn.Module):
    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)  # inner
        return pooled.values()


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(collection()), Inner(collection())

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        first: torch.Tensor = self.first(features)
        return first + self.second(features)


class Nested(nn.Module):
    """Two collections, three modules down."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = Middle()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.middle(features)


class Shared(nn.Module):
    """One collection under two names, called from two lines."""

    def __init__(self) -> None:
        super().__init__()
        self.user = collection()
        self.item = self.user

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        user: torch.Tensor = self.user(features).values()  # shared once
        item: torch.Tensor = self.item(features).values()  # shared twice
        return user + item


class AroundDLRM(nn.Module):
    """The collection is called by TorchRec's code, which this code calls."""

    def __init__(self) -> None:
        super().__init__()
        self.dlrm: DLRM = dlrm()[0]

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.dlrm(dense, sparse)  # dlrm
        return logits.sigmoid()


SAMPLE = (batch([1, 2, 3, 4]),)


def sources(model: nn.Module) -> dict[str, list[str]]:
    return {one["paths"][0]: one["sources"] for one in collect(model)["collections"]}


def node_sources(drawing: dict[str, Any], path: str) -> set[str]:
    (steps,) = (one["steps"] for one in drawing["collections"] if path in one["paths"])
    nodes = [drawing["nodes"][place] for step in steps for place in step["nodes"]]
    return {node["source"] for node in nodes if node["kind"] != "item"}


@pytest.mark.parametrize(
    ("build", "marked"),
    [
        (Nested, {"middle.first.ebc": ["inner"], "middle.second.ebc": ["inner"]}),
        (Shared, {"user": ["shared once", "shared twice"]}),
    ],
)
def test_collections_know_the_lines_that_call_them(
    build: Callable[[], nn.Module], marked: dict[str, list[str]]
) -> None:
    places = {path: [source_text(line_of(mark)) for mark in marks] for path, marks in marked.items()}
    for whole_graph in (False, True):
        converted = recfx.convert(build(), SAMPLE, hashing=RAW, whole_graph=whole_graph)
        assert sources(converted) == places
        for path, lines in places.items():
            assert node_sources(collect(converted), path) == {lines[0]}


@pytest.mark.parametrize(("build", "path", "holder"), [(Nested, "middle.first.ebc", Inner), (Shared, "user", Shared)])
def test_without_a_sample_it_is_the_class_that_holds_the_collection(
    build: Callable[[], nn.Module], path: str, holder: type
) -> None:
    defined = source_text(definition_of(holder))
    assert sources(build())[path] == [defined]
    converted = recfx.convert(build(), hashing=RAW)
    assert sources(converted)[path] == [defined]
    assert node_sources(collect(converted), path) == {defined}


def test_each_call_of_a_shared_collection_knows_its_own_line() -> None:
    graph = recfx.trace(recfx.convert(Shared(), SAMPLE, hashing=RAW), SAMPLE)
    calls = [node for node in collect(graph)["nodes"] if node["kind"] == CALL]
    assert [call["source"] for call in calls] == [
        source_text(line_of(mark)) for mark in ("shared once", "shared twice")
    ]
    assert len({call["name"] for call in calls}) == 2
    assert {call["collection"] for call in calls} == {0}
    inside = [node for node in graph.graph.nodes if node.name.startswith("user_") and node_meta(node) is not None]
    assert {line_of("shared once"), line_of("shared twice")} <= {node_meta(node).source for node in inside}  # type: ignore[union-attr]
    assert {call["inputs"] for call in calls} == {("features",)}


def test_a_collection_that_a_package_calls_knows_the_users_line_too() -> None:
    converted = recfx.convert(AroundDLRM(), dlrm()[1], verify=False)
    ((source,),) = sources(converted).values()
    assert source.startswith("torchrec/models/dlrm.py:")
    assert source.endswith(f", called from {source_text(line_of('dlrm'))}")


def test_the_passes_that_touched_a_node() -> None:
    graph = small_collection(INDEXED, ADOPTED).graph_module
    touched = {node.name: meta.passes for node in graph.graph.nodes if (meta := node_meta(node)) is not None}
    assert touched == {
        "ebc_select_features": ("expand_collection",),
        "ebc_hash_lookup": ("expand_collection", "insert_hash", "batch_lookups", "fuse_hash_lookup", "lower"),
        "ebc_mean_divide": ("insert_hash", "batch_lookups", "fuse_hash_lookup"),  # its input is another in the end
        "ebc_keyed_tensor": ("expand_collection", "insert_hash", "batch_lookups"),
    }
