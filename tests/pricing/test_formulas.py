"""The formulas of node kinds: one for each, and what they count."""

from __future__ import annotations

from recfx.ir import NODE_KINDS
from recfx.pricing.formulas import FORMULAS


def test_every_kind_of_node_has_a_formula() -> None:
    assert FORMULAS.keys() == NODE_KINDS.keys()
