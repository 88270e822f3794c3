"""The formulas of node kinds: one for each, and what they count."""

from __future__ import annotations

import pytest

import recfx
from recfx.ir import NODE_KINDS
from recfx.pricing.formulas import FORMULAS
from tests.builders.collections import collection


def test_every_kind_of_node_has_a_formula() -> None:
    assert FORMULAS.keys() == NODE_KINDS.keys()


def test_a_kind_without_a_formula_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = recfx.convert(collection(), hashing=None)
    monkeypatch.delitem(FORMULAS, "keyed_tensor")
    with pytest.raises(recfx.ConversionError, match="'keyed_tensor'") as caught:
        recfx.cost(model)
    assert caught.value.reason == "kind_without_cost"
