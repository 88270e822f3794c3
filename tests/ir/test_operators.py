"""Graphs of operators are data: they do not run, can be pickled, and are read from text that is checked."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import fx

from recfx import InputError
from recfx.ir import operators
from recfx.ir.operator_text import format_operators, parse_operators
from tests.rewrites.small_collection import ADOPTED, INDEXED, collection, rewritten


def test_an_operator_does_not_run_but_leaves_itself_in_a_trace() -> None:
    with pytest.raises(RuntimeError, match="lookup is an operator of a graph"):
        operators.OPERATORS["lookup"](torch.ones(1), collection="")

    def model(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = operators.OPERATORS["lookup"](ids, collection="a", tables=("t",), pooling="SUM")
        return found

    graph = fx.symbolic_trace(model).graph
    (node,) = [each for each in graph.nodes if operators.kind_of(each) is not None]
    assert node.kwargs == {"collection": "a", "tables": ("t",), "pooling": "SUM"}


def test_a_graph_can_be_pickled() -> None:
    graph = rewritten(collection(INDEXED, ADOPTED), "lower").graph
    loaded = pickle.loads(pickle.dumps(graph))
    assert format_operators(loaded) == format_operators(graph)
    assert loaded == graph


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("= select_features(", "= selected_features(", "'selected_features'"),
        ("(features)", "(nothing)", "'nothing'"),
        ("{tables=[users]", "{rows=[users]", "a lookup has no attribute 'rows'"),
        ("{tables=[users]", "{tables=[users", ""),
        ("kernel=cpu}", "kernel=[cpu}", "a list does not end"),
        ("{tables=[users]", "{tables=[users']", ""),
        ("pooling=SUM,", "pooling=,", ""),
        ("pooling=SUM,", "pooling=SUM SUM,", "'SUM' is not expected"),
        ("dtype=float32", "dtype=float16", "its dtype is torch.float32 by the context"),
        ("ebc_lookup =", "other_lookup =", "the context has no such collection"),
        ("return ", "returns ", "it has another form"),
    ],
)
def test_text_that_is_no_graph(old: str, new: str, why: str) -> None:
    graph = rewritten(collection(ADOPTED, INDEXED), "lower").graph
    text = format_operators(graph)
    assert old in text
    with pytest.raises(InputError, match="not_a_graph") as caught:
        parse_operators(text.replace(old, new, 1), graph.context)
    assert why in str(caught.value)
