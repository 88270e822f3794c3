"""The formulas of node kinds: one for each, and what they count."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from torchrec import EmbeddingBagCollection
from torchrec.distributed.sharding_plan import table_wise

import recfx
from recfx.ir import NODE_KINDS
from recfx.ir.meta import BATCH
from recfx.planner.pricing.formulas import FORMULAS
from tests.builders.collections import collection
from tests.builders.optimizers import attach
from tests.builders.plans import plan_of_kinds
from tests.inspect.models import config
from tests.support.refusals import refused

RAW = recfx.HashConfig(dense_rows=0)


def test_every_kind_of_node_has_a_formula() -> None:
    assert FORMULAS.keys() == NODE_KINDS.keys()


def test_a_kind_without_a_formula_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = recfx.convert(collection(), hashing=None)
    monkeypatch.delitem(FORMULAS, "keyed_tensor")
    with refused("kind_without_cost", match="'keyed_tensor'"):
        recfx.cost(model)


def test_each_table_and_each_index_is_counted() -> None:
    """On a host they are gone through one after the other, which takes longest where batches are small."""
    (fused,) = [
        node for node in recfx.cost(recfx.convert(collection(), hashing=RAW)).nodes if node.kind == "hash_lookup"
    ]
    static = [node for node in recfx.cost(recfx.convert(collection(), hashing=None)).nodes if node.kind == "lookup"]
    assert (fused.forward.tables, fused.forward.indexes, fused.backward.tables) == (2, 2, 2)
    assert [(node.forward.tables, node.forward.indexes, node.backward.tables) for node in static] == [(1, 0, 1)] * 2
    rows = sympy.Add(*(node.forward.random_accesses for node in static))
    assert sympy.expand(fused.forward.random_accesses - rows) == 0
    assert sympy.expand(fused.forward.index_accesses - rows) == 0


def test_a_step_reads_the_state_of_a_row_somewhere_else() -> None:
    accesses = {}
    for optimizer in ("sgd", "rowwise_adagrad"):
        model = collection()
        attach(model, optimizer)
        nodes = recfx.cost(recfx.convert(model, hashing=None)).nodes
        accesses[optimizer] = sum(_number(node.backward.random_accesses) for node in nodes)
    assert accesses["rowwise_adagrad"] == 2 * accesses["sgd"] > 0


def test_columns_that_arrive_in_another_order_are_moved_row_by_row() -> None:
    model = recfx.convert(EmbeddingBagCollection([config(number) for number in range(4)]), hashing=None, verify=False)
    ranges = {}
    for name, ranks in {"in order": [0, 0, 1, 1], "in turn": [0, 1, 0, 1], "one apart": [0, 1, 0, 0]}.items():
        placed = {f"t{table}": table_wise(rank=rank) for table, rank in enumerate(ranks)}
        nodes = recfx.cost(model, plan=plan_of_kinds("", model, placed, 2), world_size=2).nodes
        (keyed,) = (node for node in nodes if "keyed" in node.name)
        ranges[name] = _number(keyed.forward.copied_ranges)
        assert _number(keyed.backward.copied_ranges) == ranges[name]
        assert (keyed.read_bytes != 0) is (name != "in order")
    batch = 2
    assert ranges == {"in order": 0, "in turn": 4 * batch, "one apart": 3 * batch}


def test_the_gradient_of_a_bag_is_read_from_memory_once() -> None:
    model = collection()
    attach(model, "sgd")
    (one, *_) = (node for node in recfx.cost(recfx.convert(model, hashing=None)).nodes if node.kind == "lookup")
    lengths = [symbol for symbol in one.backward.read_bytes.free_symbols if str(symbol).startswith("L_")]
    few, many = (one.backward.read_bytes.subs(dict.fromkeys(lengths, length)).subs(BATCH, 8) for length in (100, 101))
    assert many - few == 8 * 8 * len(lengths)  # all rows are touched already: what is left are the ids themselves


def _number(expression: sympy.Expr) -> float:
    return float(expression.subs(dict.fromkeys(expression.free_symbols, 2)).doit())


@pytest.mark.parametrize(
    ("settings", "in_training"), [({}, 1), ({"on_full": "evict"}, 2), ({"admit_after": 2}, 2)], ids=str
)
@pytest.mark.parametrize("trains", [True, False])
def test_tables_that_evict_or_admit_count_ids_in_training(
    settings: dict[str, Any], in_training: int, trains: bool
) -> None:
    model = collection()
    attach(model, "sgd")
    converted = recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0, **settings), backend="reference")
    nodes = {node.kind: node.forward for node in recfx.cost(converted.train(trains)).nodes}
    ids = nodes["lookup"].random_accesses  # one for each id
    assert sympy.simplify(nodes["hash_ids"].index_accesses - (in_training if trains else 1) * ids) == 0


@pytest.mark.parametrize("config", [RAW, recfx.HashConfig(dense_rows=0, on_full="evict")], ids=["error", "evict"])
def test_a_fused_lookup_does_what_both_nodes_do_but_writes_no_rows_in_between(config: recfx.HashConfig) -> None:
    """Eight bytes per id are written by ``hash_ids``, and read again by ``lookup``."""
    nodes = {}
    for backend in ("cpu", "reference"):
        model = collection()
        attach(model, "sgd")
        for node in recfx.cost(recfx.convert(model, hashing=config, backend=backend)).nodes:
            nodes[node.kind] = node
    fused, hashed, pooled = nodes["hash_lookup"], nodes["hash_ids"], nodes["lookup"]
    ids = sympy.Add(fused.forward.random_accesses)  # one for each id
    for phase in ("forward", "backward"):
        ours, first, second = (getattr(node, phase) for node in (fused, hashed, pooled))
        for name, amount in vars(ours).items():
            less = 8 * ids if phase == "forward" and name in ("read_bytes", "written_bytes") else 0
            expected = getattr(first, name) + getattr(second, name) - less
            assert sympy.simplify(amount - expected) == 0, (phase, name)
    assert fused.resident == hashed.resident + pooled.resident
