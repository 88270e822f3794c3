"""What is said of names that a checkpoint and a model do not have in common."""

from __future__ import annotations

import pytest
import torch

import recfx
from recfx.checkpoint.names import check_names, with_prefix


def said(wanted: list[str], saved: list[str]) -> str:
    with pytest.raises(recfx.CheckpointError) as caught:
        check_names("model", wanted, saved, "do it.")
    assert (caught.value.reason, caught.value.what_to_do) == ("checkpoint_mismatch", "do it.")
    return caught.value.message


def test_the_same_names_in_any_order() -> None:
    check_names("model", ["a", "b"], ["b", "a"], "")


def test_names_of_one_side() -> None:
    assert said(["a", "b"], ["b"]) == "the checkpoint lacks a (model)."
    assert said(["b"], ["c", "b", "d"]) == "the checkpoint has c, d, which this model does not have (model)."
    assert said(["a"], ["c"]) == "the checkpoint lacks a and has c, which this model does not have (model)."


@pytest.mark.parametrize(("count", "more"), [(10, ""), (11, " and 1 more"), (25, " and 15 more")])
def test_not_too_many(count: int, more: str) -> None:
    names = [f"n{number}" for number in range(count)]
    assert said(names, []) == f"the checkpoint lacks {', '.join(names[:10])}{more} (model)."


def test_not_too_long_and_printable() -> None:
    assert said(["x" * 300], []) == f"the checkpoint lacks {'x' * 300} (model)."
    assert said(["x" * 301], []) == f"the checkpoint lacks {'x' * 300}... (model)."
    assert said(["two\nlines", "\ud800"], []) == r"the checkpoint lacks 'two\nlines', '\ud800' (model)."


def test_prefixes() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert with_prefix({"model.a": one, "models.a": two, "model.model.a": two}, "model.") == {"a": one, "model.a": two}
