"""``recfx.cost`` of models and of graphs: expressions, numbers, texts, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest
import sympy
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.planner import Topology

import recfx
from recfx.ir.meta import BATCH, mean_length
from recfx.planner.topology import npu_topology
from recfx.pricing.hardware import ASCEND_910B, H100
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.builders.optimizers import attach

RAW = recfx.HashConfig(dense_rows=0)


class Model(nn.Module):
    """A collection of two tables, and a layer over it."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.over = collection(), nn.Linear(24, 3)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        over: torch.Tensor = self.over(self.ebc(features).values())
        return over


def hashed(optimizer: str = "adagrad") -> nn.Module:
    model = Model()
    attach(model.ebc, optimizer)
    return recfx.convert(model, hashing=RAW)


def test_what_a_converted_model_keeps() -> None:
    model = hashed()
    model(batch(4)).sum().backward()
    cost = recfx.cost(model, H100)
    indexes = [buffer for index in model.ebc.hash_indexes.values() for buffer in index.buffers()]
    assert cost.resident.index == sum(buffer.nbytes for buffer in indexes)
    assert cost.resident.weights == sum(parameter.nbytes for parameter in model.parameters())
    state = [value for each in model.ebc.store.optimizers.values() for value in each.state.values()]
    assert cost.resident.optimizer == sum(tensor.nbytes for tensor in state)
    assert cost.node("dense").resident_bytes == (24 * 3 + 3) * 4


def test_the_nodes_are_those_of_the_graph() -> None:
    model = hashed()
    names = [node.name for node in model.ebc.graph_module.graph.nodes if node.op == "call_module"]
    assert [node.name for node in recfx.cost(model).nodes] == [*names, "dense"]


def test_the_expressions_of_a_lookup() -> None:
    """A row of 32 bytes and its number per id, an offset per bag; 32 bytes per bag are written."""
    model = recfx.convert(Model(), hashing=None).eval()
    node = next(node for node in recfx.cost(model).nodes if node.kind == "lookup" and "t2" in node.tables)
    ids = BATCH * (mean_length("f2") + mean_length("f3"))
    if node.tables == ("t1", "t2"):
        ids += BATCH * mean_length("f1")
    bags = (3 if node.tables == ("t1", "t2") else 2) * BATCH
    assert sympy.expand(node.read_bytes - (40 * ids + 8 * bags)) == 0
    assert sympy.expand(node.written_bytes - 32 * bags) == 0
    assert sympy.expand(node.flops - 8 * ids) == 0


def test_a_fused_step_touches_no_more_rows_than_there_are() -> None:
    cost = recfx.cost(hashed())
    few, many = cost.at(10, L=1).totals, cost.at(10_000, L=1).totals
    assert many.read_bytes < 1000 * few.read_bytes


def test_eval_has_no_backward() -> None:
    model = hashed()
    training, evaluating = recfx.cost(model), recfx.cost(model.eval())
    assert (training.trains, evaluating.trains) == (True, False)
    assert evaluating.at(16).totals.written_bytes < training.at(16).totals.written_bytes


@pytest.mark.parametrize("whole", [False, True])
def test_a_traced_graph_costs_what_its_model_costs(whole: bool) -> None:
    model, sample = hashed(), batch(4)
    graph = recfx.trace(model, sample)
    subject = recfx.convert(Model(), sample, hashing=RAW, whole_graph=True) if whole else graph
    found, expected = recfx.cost(subject, H100).at(64), recfx.cost(model, H100).at(64)
    if not whole:
        assert found.totals.resident == expected.totals.resident
        assert found.seconds == pytest.approx(expected.seconds)
    assert {node.kind for node in found.nodes} == {node.kind for node in expected.nodes}


@pytest.mark.parametrize("topology", [npu_topology(8), Topology(2, "cpu")], ids=["npu", "cpu"])
def test_a_graph_is_not_planned(topology: Topology) -> None:
    """Not even silently: its price would be that of one rank."""
    model, sample = hashed(), batch(4)
    whole = recfx.convert(Model(), sample, hashing=RAW, whole_graph=True)
    for graph in (recfx.trace(model, sample), whole, model.ebc.graph_module):
        with pytest.raises(recfx.ConversionError, match="a graph of one rank cannot be priced on") as caught:
            recfx.cost(graph, topology)
        assert caught.value.reason == "already_sharded"
        assert recfx.cost(graph, npu_topology(1)).at(8).seconds > 0
    assert len(recfx.cost(model, topology).at(8).ranks) == topology.world_size


def test_lengths_by_feature_and_for_all() -> None:
    cost = recfx.cost(hashed(), H100)
    assert cost.features == ("f1", "f2", "f3")
    assert cost.at(8, L=2.5).totals == cost.at(8, L={"f1": 2.5, "f2": 2.5, "f3": 2.5, "more": 1}).totals
    assert cost.at(8, L={"f1": 9, "f2": 0, "f3": 0}).seconds > cost.at(8, L=0).seconds


def test_numbers_of_numpy_are_numbers() -> None:
    cost = recfx.cost(hashed(), H100)
    assert cost.at(numpy.int64(8), L=numpy.float32(2.5)).totals == cost.at(8, L=2.5).totals


def test_hardware_changes_times_alone() -> None:
    model = hashed()
    slow, fast = recfx.cost(model, ASCEND_910B).at(4096, L=20), recfx.cost(model, H100).at(4096, L=20)
    assert slow.seconds > fast.seconds
    assert slow.totals.read_bytes == fast.totals.read_bytes


def test_texts() -> None:
    cost = recfx.cost(hashed(), H100)
    assert "ebc_select_features  (select_features)" in str(cost)
    table = str(cost.at(512, L=3))
    assert table.splitlines()[0].startswith("B=512, times predicted for H100")
    assert table.splitlines()[-1].startswith("total")
    data, numbers = json.loads(cost.to_json()), json.loads(cost.at(512, L=3).to_json())
    assert (data["version"], numbers["version"]) == ("1", "1")
    assert data["nodes"][0]["forward"]["read_bytes"] == str(cost.nodes[0].forward.read_bytes)
    assert numbers["totals"]["seconds"] == cost.at(512, L=3).seconds


@pytest.mark.parametrize("subject", ["model", None, {"a": 1}])
def test_refuses_what_is_no_model(subject: Any) -> None:
    with pytest.raises(recfx.ConversionError) as caught:
        recfx.cost(subject)
    assert caught.value.reason == "invalid_argument"


def test_refuses_a_model_without_a_collection() -> None:
    with pytest.raises(recfx.ConversionError) as caught:
        recfx.cost(nn.Linear(2, 2))
    assert caught.value.reason == "no_collection"


@pytest.mark.parametrize(
    ("batch_size", "lengths", "reason"),
    [
        (0, 1, "invalid_argument"),
        (2.5, 1, "invalid_argument"),
        (4, -1, "invalid_argument"),
        (4, float("nan"), "invalid_argument"),
        (4, "many", "invalid_argument"),
        (4, {"f1": 1, "f2": True, "f3": 1}, "invalid_argument"),
        (4, {"f1": 1}, "missing_feature"),
    ],
)
def test_refuses_numbers_that_make_no_batch(batch_size: Any, lengths: Any, reason: str) -> None:
    with pytest.raises(recfx.InputError) as caught:
        recfx.cost(hashed(), H100).at(batch_size, L=lengths)
    assert caught.value.reason == reason


def test_refuses_a_topology_of_another_kind() -> None:
    with pytest.raises(recfx.ConversionError) as caught:
        recfx.cost(hashed(), "H100")
    assert caught.value.reason == "invalid_argument"
