"""Expressions as data that a page can evaluate."""

from __future__ import annotations

from dataclasses import replace

import sympy

import recfx
from recfx.inspect.drawing.costs import TIME, costs_of, time_formula
from recfx.ir.meta import mean_length
from recfx.planner.pricing.hardware import CPU_HOST, H100
from recfx.planner.pricing.work import NOTHING
from tests.inspect.models import dlrm

A, B = mean_length("a"), mean_length("b")


def test_a_time_that_is_not_known_is_not_left_out() -> None:
    """Otherwise the sum of all nodes would be too low."""
    model = recfx.convert(dlrm()[0], verify=False)
    by_kind = {node.kind: node for node in recfx.cost(model).nodes}
    assert time_formula(by_kind["lookup"], H100, 1, lambda _: None) is None
    nothing = NOTHING.mapped(sympy.sympify)
    assert time_formula(replace(by_kind["lookup"], forward=nothing, backward=nothing), H100, 1, lambda _: None) == 0
    predicted = [node.seconds > 0 for node in recfx.cost(model, H100).at().nodes]
    costs = costs_of(model, H100)
    assert [
        TIME in [name for name, _, _ in amounts] for amounts in map(costs.amounts_of, costs.cost.nodes)
    ] == predicted
    assert costs_of(model).cost.hardware == CPU_HOST
