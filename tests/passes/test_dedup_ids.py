"""dedup_ids: the graph of one rank as text, what is declined and why, and what the verifier says of half of it."""

from typing import Any

import pytest

import recfx
from recfx.collections.compile_graph import context_now
from recfx.collections.sharding.plan import read_plan
from recfx.ir import format_graph
from recfx.ir.context import CollectionContext
from recfx.ir.dedup import pays
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.verifier import GraphVerificationError, verify_graph
from recfx.lowering.registry import TargetsHere
from recfx.passes.base import run_passes
from tests.passes.small_collection import until
from tests.sharding.cases import Case, Table, as_sequence, build, plan_of

TABLES = (Table("a", 8, 64, ("f0",), "SUM", ("row_wise",)), Table("b", 8, 64, ("f1", "f0"), "SUM", ("data_parallel",)))
COUNTED = recfx.HashConfig(dense_rows=0, rows=64, on_full="evict")
ADMITTED = recfx.HashConfig(dense_rows=0, rows=64, admit_after=2)


def rewritten(dedup: Any, hashing: Any = None, is_pooled: bool = False) -> tuple[OperatorGraph, list[str]]:
    """The graph of rank 1 of 2 after the pass, and the reasons of what it declined."""
    case = Case(TABLES) if is_pooled else as_sequence(Case(TABLES))
    converted: Any = recfx.convert(build(case)[0], hashing=hashing, dedup=dedup, verify=False)
    sharding = read_plan(converted.tables, plan_of(case, converted, 2), 1, 2)
    context = context_now(CollectionContext("", converted.tables, {}, sharding=sharding), converted.store)
    made = run_passes(OperatorGraph.of(context, TargetsHere()), until("dedup_ids"))
    return made.graph, [declined.code for declined in made.records[-1].declined]


def test_ids_of_some_tables_are_sent_once() -> None:
    graph, declined = rewritten({"b": True})
    text = format_graph(graph)
    assert text == "\n".join(
        (
            "features = input",
            "ebc_select_features = select_features(features)",
            "ebc_dedup_ids = dedup_ids(ebc_select_features) {deduped=[b]}",
            "ebc_different_ids = ebc_dedup_ids[0]",
            "ebc_inverse = ebc_dedup_ids[1]",
            "ebc_bucketize = bucketize(ebc_different_ids)",
            "ebc_input_dist_start = input_dist_start(ebc_bucketize)",
            "ebc_ids_in_flight = ebc_input_dist_start[0]",
            "ebc_dist_context_in_flight = ebc_input_dist_start[1]",
            "ebc_input_dist_wait = input_dist_wait(ebc_ids_in_flight, ebc_dist_context_in_flight)",
            "ebc_ids = ebc_input_dist_wait[0]",
            "ebc_dist_context = ebc_input_dist_wait[1]",
            "ebc_lookup = lookup(ebc_ids) {tables=[a], combine=NONE, dtype=float32}",
            "ebc_output_dist_start = output_dist_start(ebc_lookup, ebc_dist_context) "
            "{way=rows, operation=rows_all_to_all}",
            "ebc_lookup_1 = lookup(ebc_ids) {tables=[b], combine=NONE, dtype=float32}",
            "ebc_output_dist_start_1 = output_dist_start(ebc_lookup_1, ebc_dist_context) "
            "{way=rows_data_parallel, operation=own_rows}",
            "ebc_output_dist_wait = output_dist_wait(ebc_output_dist_start)",
            "ebc_output_dist_wait_1 = output_dist_wait(ebc_output_dist_start_1)",
            "ebc_expand_rows = expand_rows(ebc_output_dist_wait_1, ebc_inverse)",
            "ebc_jagged_dict = jagged_dict(ebc_output_dist_wait, ebc_expand_rows, ebc_select_features)",
            "return ebc_jagged_dict",
        )
    )
    assert declined == ["dedup_ratio_unknown"]


@pytest.mark.parametrize(
    ("dedup", "hashing", "is_pooled", "codes"),
    [
        ("auto", None, False, ["dedup_ratio_unknown"] * 2),
        (False, None, False, ["dedup_off"] * 2),
        ({"a": 0.95, "b": 0.2}, None, False, ["dedup_does_not_pay"]),
        ({"a": 0.2, "b": 0.2}, None, False, []),
        (True, COUNTED, False, ["dedup_counted"] * 2),
        (True, {"a": ADMITTED, "b": None}, False, ["dedup_counted"]),
        (True, recfx.HashConfig(dense_rows=0), False, []),
        (True, None, True, ["dedup_pooled"] * 2),
        ("auto", None, True, []),
    ],
)
def test_what_is_declined_and_why(dedup: Any, hashing: Any, is_pooled: bool, codes: list[str]) -> None:
    graph, declined = rewritten(dedup, hashing, is_pooled)
    assert declined == codes
    deduped = 0 if is_pooled or dedup in ("auto", False) else 2 - len(codes)
    assert [len(node.kwargs["deduped"]) for node in graph.of_kind("dedup_ids")] == [deduped] * bool(deduped)


def test_it_pays_where_fewer_ids_are_different_and_rows_are_wide() -> None:
    assert [pays(share, 64) for share in (0.1, 0.5, 0.7, 0.75, 1.0)] == [True, True, True, False, False]
    assert [pays(0.7, dim) for dim in (4, 64)] == [False, True]


def test_without_a_plan_nothing_changes() -> None:
    converted: Any = recfx.convert(build(as_sequence(Case(TABLES)))[0], dedup=True, verify=False)
    made = run_passes(converted.unexpanded_graph(), until("dedup_ids"))
    assert (made.records[-1].modified, made.records[-1].declined) == (False, ())


def test_rows_of_different_ids_must_be_expanded() -> None:
    graph, _ = rewritten(True)
    expanded = graph.of_kind("expand_rows")[0]
    graph.replace(expanded, expanded.all_input_nodes[0])
    graph.graph.erase_node(expanded)
    with pytest.raises(GraphVerificationError, match="node ebc_jagged_dict: ebc_output_dist_wait must be the rows"):
        verify_graph(graph, "mine")


def test_ids_of_pooled_tables_are_all_needed() -> None:
    graph, _ = rewritten(True, is_pooled=True)
    (sender,) = graph.of_kind("bucketize")
    (ids,) = sender.all_input_nodes
    with graph.graph.inserting_before(sender):
        different = graph.item(graph.add("dedup_ids", (ids,), "", deduped=("a",)), 0, "different_ids")
    sender.replace_input_with(ids, different)
    with pytest.raises(GraphVerificationError, match="node ebc_dedup_ids: its collection pools the rows"):
        verify_graph(graph, "mine")
