"""Graphs of operators are data: they do not run, can be pickled, and are read from text that is checked."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from torch import fx

from recfx import InputError
from recfx.ir import operators
from recfx.ir.printer import format_graph, parse_graph
from tests.passes.small_collection import ADOPTED, INDEXED, collection, rewritten


def test_an_operator_does_not_run_but_leaves_itself_in_a_trace() -> None:
    with pytest.raises(RuntimeError, match="lookup is an operator of a graph"):
        operators.OPERATORS["lookup"](torch.ones(1), collection="")

    def model(ids: torch.Tensor) -> torch.Tensor:
        looked_up: torch.Tensor = operators.OPERATORS["lookup"](ids, collection="a", tables=("t",), combine="SUM")
        return looked_up

    graph = fx.symbolic_trace(model).graph
    (node,) = [candidate for candidate in graph.nodes if operators.kind_of(candidate) is not None]
    assert node.kwargs == {"collection": "a", "tables": ("t",), "combine": "SUM"}


def test_a_graph_can_be_pickled() -> None:
    graph = rewritten(collection(INDEXED, ADOPTED), "lower").graph
    loaded = pickle.loads(pickle.dumps(graph))
    assert format_graph(loaded) == format_graph(graph)
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
        ("combine=SUM,", "combine=,", ""),
        ("combine=SUM,", "combine=SUM SUM,", "'SUM' is not expected"),
        ("dtype=float32", "dtype=float16", "its dtype is float32 by the context"),
        ("ebc_lookup =", "other_lookup =", "the context has no such collection"),
        ("return ", "returns ", "it has another form"),
        ("\nreturn ebc_keyed_tensor", "", "it returns nothing"),
        ("ebc_lookup_1 =", "ebc_lookup =", "no node, or another one, can be called 'ebc_lookup'"),
        ("{tables=[users]", "{tables", "its tables is True, not a tuple"),
        ("{tables=[users]", "{tables=[other]", "its tables has 'other'"),
        (
            "ebc_lookup = lookup(ebc_hash_ids)",
            "ebc_lookup = lookup(ebc_hash_ids, features)",
            "cannot be fed by features",
        ),
        ("keyed_tensor(ebc_lookup, ebc_lookup_1)", "keyed_tensor(ebc_lookup)", "nothing uses this lookup"),
        ("keyed_tensor(ebc_lookup, ebc_lookup_1)", "keyed_tensor(ebc_lookup, ebc_lookup_1) {dtype=float32}", "not set"),
    ],
)
def test_text_that_is_no_graph(old: str, new: str, why: str) -> None:
    graph = rewritten(collection(ADOPTED, INDEXED), "lower").graph
    text = format_graph(graph)
    assert old in text
    with pytest.raises(InputError, match="not_a_graph") as caught:
        parse_graph(text.replace(old, new, 1), graph.context)
    assert why in str(caught.value)


def test_text_that_was_changed_at_random_is_a_graph_or_is_refused() -> None:
    texts = [format_graph(rewritten(collection(INDEXED, ADOPTED), name).graph) for name in ("insert_hash", "lower")]
    context = rewritten(collection(INDEXED, ADOPTED), "lower").graph.context
    draw, pieces = random.Random(0), ["", "[", "]", "=", ",", " ", "'", "1", "users", "\n", "}"]
    for _ in range(400):
        letters = list(draw.choice(texts))
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(letters))
            letters[place : place + draw.randint(0, 6)] = draw.choice(pieces)
        try:
            graph = parse_graph("".join(letters), context)
        except InputError:
            continue
        assert parse_graph(format_graph(graph), context) == graph
