"""Prices of graphs of any rank of any plan: they are those of the nodes that the planner lists, node by node."""

from __future__ import annotations

from dataclasses import replace

import pytest

import recfx
from recfx.collections.collection import UnshardedCollection
from recfx.planner.pricing.formulas import formula_of
from recfx.planner.pricing.graph_prices import price_graph
from recfx.planner.pricing.node_price import calls_of
from recfx.planner.pricing.planned_collection import PlannedCollection, planned_by, planned_graph
from recfx.planner.pricing.planned_nodes import PlannedGraphs
from recfx.planner.pricing.values import Values
from recfx.runtime.wire import wires_of
from tests.sharding.cases import FORMS, Case, build, plan_of, with_optimizer
from tests.sharding.typical_cases import CASES, TYPES, hashed_case, one_type, random_case
from tests.support.pairwise import pairwise

WORLD_SIZE = 4
RAW = recfx.HashConfig(dense_rows=0, rows=64, buckets=5)


def planned(case: Case, device: str) -> PlannedCollection:
    """Over two hosts of two ranks."""
    case = replace(case, local_size=2)
    converted = with_optimizer(
        case, recfx.convert(build(case)[0], hashing=case.hashing, dedup=case.dedup, verify=False)
    )
    assert isinstance(converted, UnshardedCollection)
    planned = planned_by(converted, plan_of(case, converted, WORLD_SIZE), WORLD_SIZE, device, "sparse")
    sharding = replace(planned.sharding, wires=wires_of(case.codecs))
    return replace(planned, context=replace(planned.context, sharding=sharding))


def check(collection: PlannedCollection, trains: bool = True) -> None:
    tables = collection.tables
    features = list(dict.fromkeys(name for table in tables for name in (*table.feature_names, *table.sent_lengths)))
    lengths = {name: 1.5 + place for place, name in enumerate(features)}
    prices = [price_graph(planned_graph(collection, rank).graph, trains) for rank in range(WORLD_SIZE)]
    for values in (Values(7, WORLD_SIZE, lengths, features), Values(10_000, WORLD_SIZE, 3, features)):
        graphs = PlannedGraphs(collection, values.symbols, trains)
        for rank, priced in enumerate(prices):
            listed = graphs.nodes(rank)
            assert [node.name for node in listed] == [node.name for node in priced]
            for node, expected in zip(listed, priced, strict=True):
                assert (node.facts.kind, node.on_host) == (expected.kind, expected.on_host)
                phases = formula_of(node.facts.kind)(node.facts)
                for ours, theirs in ((phases.forward, expected.forward), (phases.backward, expected.backward)):
                    numbers = [work.mapped(values.number) for work in (ours, theirs)]
                    assert numbers[0].amounts() == pytest.approx(numbers[1].amounts()), node.name
                    for one, other in zip(numbers[0].launches, numbers[1].launches, strict=True):
                        assert one.form == other.form
                        assert (one.positions, one.more) == pytest.approx((other.positions, other.more)), node.name
                sent = [calls_of(node.facts.kind, work.collectives, values) for work in (node, expected)]
                assert [call._replace(passed_bytes=0) for call in sent[0]] == [
                    call._replace(passed_bytes=0) for call in sent[1]
                ]
                numbers_of_bytes = [[call.passed_bytes for call in calls] for calls in sent]
                assert numbers_of_bytes[0] == pytest.approx(numbers_of_bytes[1]), node.name
            assert graphs.resident(rank) == sum((node.resident for node in priced[1:]), start=priced[0].resident), (
                "and nothing is counted twice"
            )


PLANS = {
    **{f"{kind}_static": one_type(kind, optimizer="adagrad") for kind in TYPES},
    **{f"{kind}_hashed": hashed_case(kind, "lfu_admit") for kind in TYPES},
    **{f"{kind}_weighted": one_type(kind, is_weighted=True, wire=("fp16", "bf16")) for kind in TYPES},
    **CASES,
    **{f"random {number}": random_case(number, WORLD_SIZE) for number in range(10)},
    **{f"random {number} hashed": replace(random_case(number, WORLD_SIZE), hashing=RAW) for number in range(10)},
}


@pairwise(name=PLANS, device=["cpu", "cuda", "npu"], form=FORMS)
def test_the_planner_lists_the_nodes_of_the_graph(name: str, device: str, form: str) -> None:
    check(planned(FORMS[form](PLANS[name]), device))


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_a_step_without_a_backward(device: str) -> None:
    check(planned(hashed_case("row_wise", "error"), device), trains=False)
