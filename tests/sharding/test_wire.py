"""The collectives of the graph are those on the wire: as many, in the same order, with as many bytes."""

from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch import fx
from torchrec import KeyedJaggedTensor

from recfx.ir.dedup import different
from recfx.ir.meta import BATCH, Collective, mean_length, node_meta
from tests.sharding.cases import FORMS, Case, Table, batches, build, shard, values_of
from tests.sharding.ranks import ranks
from tests.sharding.recorded import Sent, recorded
from tests.sharding.typical_cases import TYPES, one_type, random_case
from tests.support.pairwise import pairwise


def predicted(graph: fx.Graph, values: dict[sympy.Symbol, Any]) -> tuple[Sent, Sent]:
    """What the graph says of the forward, in order, and of the backward."""
    forward, backward = [], []
    for node in graph.nodes:
        meta = node_meta(node)
        for collective in () if meta is None else meta.collectives:
            assert isinstance(collective, Collective)
            size = collective.bytes.subs(values)
            assert size.is_integer, f"{node.name}: {collective.bytes} is {size}"
            (backward if collective.backward else forward).append((collective.operation, int(size)))
    return forward, backward


def even_batch(case: Case) -> KeyedJaggedTensor:
    """A batch that is equal on all ranks.

    It has every row of every table three times per feature, so that all pieces of rows get as many ids.
    """
    keys = sorted({feature for table in case.tables for feature in table.features})
    rows = case.tables[0].rows
    return KeyedJaggedTensor(
        keys, torch.arange(rows).repeat(3 * len(keys)), lengths=torch.full((2 * len(keys),), 3 * rows // 2)
    )


def record_step(rank: int, world_size: int, case: Case) -> tuple[Sent, Sent, Sent, Sent]:
    standard, _ = build(case)
    sharded = shard(case, standard, world_size)
    features = batches(case, world_size, 1)[0][rank] if case.is_pooled else even_batch(case)
    values: dict[sympy.Symbol, Any] = {BATCH: features.stride()}
    for key in features.keys():  # noqa: SIM118 (a KeyedJaggedTensor is no dict)
        values[mean_length(key)] = sympy.Rational(int(features[key].lengths().sum()), features.stride())
        sent_once = features[key].values().unique().numel()
        values[mean_length(different(key))] = sympy.Rational(sent_once, features.stride())
    results: list[torch.Tensor] = []
    forward = recorded(lambda: results.append(values_of(sharded(features))))
    backward = recorded(lambda: results[0].sum().backward())
    return forward, backward, *predicted(sharded.graph_module.graph, values)


def check_wire(case: Case, world_size: int) -> None:
    for forward, backward, forward_predicted, backward_predicted in ranks(world_size).run(record_step, case):
        assert forward == forward_predicted
        assert sorted(backward) == sorted(backward_predicted)
        assert world_size == 1 or forward


WIRES = [("fp32", "fp32"), ("fp16", "fp32"), ("fp32", "bf16")]


@pairwise(kind=sorted(TYPES), world_size=[2, 4], wire=WIRES[:2])
def test_a_type_sends_what_its_graph_says(kind: str, world_size: int, wire: tuple[str, str]) -> None:
    check_wire(one_type(kind, local_size=2 if world_size == 4 else 0, wire=wire), world_size)


@pairwise(kind=sorted(TYPES), world_size=[2, 4], form=["rows", "rows sent once"], wire=WIRES)
def test_rows_of_ids_are_as_many_as_the_graph_says(
    kind: str, world_size: int, form: str, wire: tuple[str, str]
) -> None:
    dim = 256 if kind == "grid_shard" else 8
    tables = (
        Table("a", 16, dim, ("f0",), sharding=TYPES[kind]),
        Table("b", 16, dim, ("f1", "f0"), sharding=TYPES[kind]),
    )
    check_wire(FORMS[form](Case(tables, local_size=2 if world_size == 4 else 0, wire=wire)), world_size)


@pytest.mark.parametrize("number", range(5))
def test_a_mixed_plan_sends_what_its_graph_says(number: int) -> None:
    case = random_case(number, 4)
    check_wire(replace(case, sizes=(3,)), 4)
