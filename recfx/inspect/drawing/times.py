"""The predicted time of a node as a formula that a page evaluates; it is linear in the node's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_price import runs_on_host
from recfx.planner.pricing.times import WorkAt, seconds_of_collective, seconds_of_work
from recfx.planner.pricing.work import NodeCost

_NOTHING = WorkAt(*(0.0 for _ in WorkAt._fields))


def time_formula(node: NodeCost, hardware: Hardware, world_size: int, formula: Callable[[sympy.Expr], Any]) -> Any:
    """The seconds that :func:`recfx.planner.pricing.node_price.price` predicts, as a formula.

    Args:
        node: of one rank.
        hardware: where it runs.
        world_size: the number of ranks.
        formula: makes the formula of an expression; None if it is not known.

    Returns:
        0 for a node that has nothing to do; None if a formula is not known.
    """
    on_host = runs_on_host(node, hardware)
    overhead = seconds_of_work(_NOTHING, hardware, on_host)
    terms: list[Any] = []
    for work in (node.forward, node.backward):
        amounts = {name: sympy.sympify(getattr(work, name)) for name in WorkAt._fields}
        found = {name: amount for name, amount in amounts.items() if amount != 0}
        for name, amount in found.items():
            one = seconds_of_work(_NOTHING._replace(**{name: 1.0}), hardware, on_host)
            terms.append(["*", one - overhead, formula(amount)])
        terms += [overhead] if found else []
    for call in node.collectives:
        ranks = call.ranks or world_size
        latency, one = (
            seconds_of_collective(call.operation, size, ranks, hardware, across_hosts=call.across_hosts)
            for size in (0.0, 1.0)
        )
        terms += [latency, ["*", one - latency, formula(call.bytes)]]
    if any(isinstance(term, list) and term[-1] is None for term in terms):
        return None
    return ["*", node.calls, ["+", *terms]] if terms else 0
