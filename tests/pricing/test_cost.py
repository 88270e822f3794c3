"""``recfx.cost`` of models and of graphs: expressions, numbers, texts, and what it refuses."""

from collections.abc import Callable
from typing import Any, get_args

import numpy
import pytest
import sympy
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.planner import Topology

import recfx
from recfx.commandline.main import HARDWARE
from recfx.ir.meta import BATCH, mean_length
from recfx.planner.pricing.hardware import ASCEND_910B, CPU_HOST, H100, NAMED, HardwareName
from recfx.planner.topology import npu_topology
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.builders.models import Over
from tests.builders.optimizers import attach
from tests.support.refusals import refused

RAW = recfx.HashConfig(dense_rows=0)


def hashed(optimizer: str = "adagrad") -> nn.Module:
    model = Over(outputs=3)
    attach(model.ebc, optimizer)
    return recfx.convert(model, hashing=RAW)


def test_what_a_converted_model_keeps() -> None:
    model = hashed()
    model(batch(4)).sum().backward()
    cost = recfx.cost(model, H100)
    indexes = [buffer for index in model.ebc.hash_indexes.values() for buffer in index.buffers()]
    assert cost.totals.resident.index == sum(buffer.nbytes for buffer in indexes)
    assert cost.totals.resident.weights == sum(parameter.nbytes for parameter in model.parameters())
    state = [value for optimizer in model.ebc.store.optimizers.values() for value in optimizer.state.values()]
    assert cost.totals.resident.optimizer == sum(tensor.nbytes for tensor in state)
    assert cost.node("dense").resident_bytes == (24 * 3 + 3) * 4


def test_the_nodes_are_those_of_the_graph() -> None:
    model = hashed()
    names = [node.name for node in model.ebc.graph_module.graph.nodes if node.op == "call_module"]
    assert [node.name for node in recfx.cost(model).nodes] == [*names, "dense"]


def test_the_expressions_of_a_lookup() -> None:
    """A row of 32 bytes and its number per id, an offset per bag; 32 bytes per bag are written."""
    model = recfx.convert(Over(outputs=3), hashing=None).eval()
    node = next(node for node in recfx.cost(model).nodes if node.kind == "lookup" and "t2" in node.tables)
    ids = BATCH * (mean_length("f2") + mean_length("f3"))
    if node.tables == ("t1", "t2"):
        ids += BATCH * mean_length("f1")
    bags = (3 if node.tables == ("t1", "t2") else 2) * BATCH
    assert sympy.expand(node.read_bytes - (40 * ids + 8 * bags)) == 0
    assert sympy.expand(node.written_bytes - 32 * bags) == 0
    assert sympy.expand(node.flops - 8 * ids) == 0


@pytest.mark.parametrize("whole", [False, True])
def test_a_traced_graph_costs_what_its_model_costs(whole: bool) -> None:
    model, sample = hashed(), batch(4)
    graph = recfx.trace(model, sample)
    subject = recfx.convert(Over(outputs=3), sample, hashing=RAW, whole_graph=True) if whole else graph
    actual, expected = recfx.cost(subject, CPU_HOST).at(64), recfx.cost(model, CPU_HOST).at(64)
    if not whole:
        assert actual.totals.resident == expected.totals.resident
        assert actual.seconds == pytest.approx(expected.seconds)
    assert {node.kind for node in actual.nodes} == {node.kind for node in expected.nodes}


@pytest.mark.parametrize("topology", [npu_topology(8), Topology(2, "cpu")], ids=["npu", "cpu"])
def test_a_graph_is_not_planned(topology: Topology) -> None:
    """Not even silently: its price would be that of one rank."""
    model, sample = hashed(), batch(4)
    whole = recfx.convert(Over(outputs=3), sample, hashing=RAW, whole_graph=True)
    for graph in (recfx.trace(model, sample), whole, model.ebc.graph_module):
        with refused("already_sharded"):
            recfx.cost(graph, topology)
        assert recfx.cost(graph, npu_topology(1)).at(8).seconds > 0
    assert len(recfx.cost(model, topology).at(8).ranks) == topology.world_size


def test_collections_that_are_called_twice_are_kept_once() -> None:
    class Twice(Over):
        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return super().forward(features) + super().forward(features)

    model = recfx.convert(Twice(outputs=3), hashing=RAW)
    twice, once = recfx.cost(recfx.trace(model, batch(4))), recfx.cost(hashed("sgd"))
    assert twice.totals.resident == once.totals.resident
    assert sympy.expand(twice.totals.read_bytes) != sympy.expand(once.totals.read_bytes)
    assert len({node.name for node in twice.nodes if node.kind == "select_features"}) == 2


def test_tables_that_share_a_weight_keep_it_once() -> None:
    model = nn.ModuleDict({"one": collection(), "other": collection()})
    alone = recfx.cost(recfx.convert(model, hashing=None)).totals.resident.weights
    tables = [part.embedding_bags["t1"] for part in model.values()]
    tables[0].weight = tables[1].weight
    assert recfx.cost(recfx.convert(model, hashing=None)).totals.resident.weights == alone - tables[0].weight.nbytes


def changed(model: nn.Module) -> nn.Module:
    attach(model.ebc, "adagrad")
    return model


@pytest.mark.parametrize("change", [changed, nn.Module.half, nn.Module.double], ids=["optimizer", "half", "double"])
@pytest.mark.parametrize("hashing", [None, RAW], ids=["static", "raw"])
def test_what_has_changed_since_the_conversion_is_known_before_a_forward(
    change: Callable[[nn.Module], nn.Module], hashing: Any
) -> None:
    model = change(recfx.convert(Over(outputs=3), hashing=hashing))
    price = recfx.cost(model, H100)
    model.ebc(batch(4))
    assert price.nodes == recfx.cost(model, H100).nodes
    weight, cost = model.ebc.weight("t2"), price.node("dense")
    assert price.totals.resident.weights == cost.resident.weights + sum(
        parameter.nbytes for parameter in model.ebc.parameters()
    )
    (node,) = [node for node in price.nodes if node.kind.endswith("lookup") and "t2" in node.tables]
    per_id = node.forward.read_bytes.coeff(BATCH).expand().coeff(mean_length("f2"))
    index = 64 if node.kind == "hash_lookup" else 0
    assert per_id == 8 + index + weight.shape[1] * weight.element_size()
    assert (price.totals.resident.optimizer > 0) == (change is changed)


def test_lengths_by_feature_and_for_all() -> None:
    cost = recfx.cost(hashed(), H100)
    assert cost.features == ("f1", "f2", "f3")
    assert cost.at(8, L=2.5).totals == cost.at(8, L={"f1": 2.5, "f2": 2.5, "f3": 2.5, "more": 1}).totals
    assert cost.at(8, L={"f2": 3, "": 2.5}).lengths == {"f1": 2.5, "f2": 3, "f3": 2.5}
    assert cost.at(8, L={"f2": 3}).lengths == {"f1": 1, "f2": 3, "f3": 1}
    assert cost.at(8, L={"f1": 9, "f2": 0, "f3": 0}).seconds > cost.at(8, L=0).seconds
    assert cost.at(numpy.int64(8), L=numpy.float32(2.5)).totals == cost.at(8, L=2.5).totals


def test_numbers_start_from_the_sample() -> None:
    sample = KeyedJaggedTensor(["f1", "f2"], torch.arange(9), lengths=torch.tensor([1, 1, 1, 2, 1, 3]))
    cost = recfx.cost(hashed(), H100, sample=(sample,))
    at = cost.at()
    assert (at.batch, at.lengths) == (3, {"f1": 1, "f2": 2, "f3": 1})
    assert at.totals == recfx.cost(hashed(), H100).at(3, L={"f2": 2}).totals
    assert at.step_text.endswith("training step on H100, B=3, L: f2=2, f1=1, f3=1")
    on_meta = recfx.cost(hashed(), H100, sample=sample.to(torch.device("meta"))).at()
    assert (on_meta.batch, on_meta.lengths["f1"]) == (3, 1)
    assert recfx.cost(Over(outputs=3), Topology(2, "cpu"), sample=sample).at(W=4).batch == 3


@pytest.mark.parametrize("topology", [ASCEND_910B, H100, npu_topology(1)], ids=["npu", "gpu", "one rank"])
def test_a_model_on_this_host_is_priced_as_on_the_device(topology: Any) -> None:
    model = hashed()
    cost = recfx.cost(model, topology)
    assert [node.kind for node in cost.nodes][:4] == ["select_features", "to_host", "hash_ids", "to_device"]
    assert {node.kind for node in cost.nodes[4:]} == {"lookup", "mean_divide", "keyed_tensor", "dense"}
    assert cost.totals.resident == recfx.cost(model, CPU_HOST).totals.resident
    assert cost.device == cost.hardware.device
    evaluated = [node.kind for node in recfx.cost(model.eval(), topology).nodes]
    assert "to_host" not in evaluated
    assert "find_rows" in evaluated


def test_a_graph_of_this_host_says_what_it_lacks_elsewhere() -> None:
    graph, raw = recfx.trace(hashed(), batch(4)), recfx.trace(recfx.convert(Over(outputs=3), hashing=None), batch(4))
    assert recfx.cost(graph, ASCEND_910B).copies_left_out
    for subject, hardware in ((graph, CPU_HOST), (hashed(), ASCEND_910B), (hashed(), npu_topology(2)), (raw, H100)):
        assert not recfx.cost(subject, hardware).copies_left_out


def test_hardware_by_the_names_of_the_command_line() -> None:
    assert tuple(NAMED) == HARDWARE == get_args(HardwareName)
    assert recfx.cost(hashed(), "ascend_910b").at().hardware == ASCEND_910B
    with refused("invalid_argument", match=r"topology is 'H100' \(did you mean 'h100'\?\)"):
        recfx.cost(hashed(), "H100")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("model",), "invalid_argument"),
        ((None,), "invalid_argument"),
        (({"a": 1},), "invalid_argument"),
        ((Over(outputs=3), "A100"), "invalid_argument"),
        ((nn.Linear(2, 2),), "no_collection"),
    ],
)
def test_refuses_what_has_no_cost(arguments: Any, reason: str) -> None:
    with refused(reason):
        recfx.cost(*arguments)


@pytest.mark.parametrize(
    ("batch_size", "lengths", "reason"),
    [
        (0, 1, "invalid_argument"),
        (2.5, 1, "invalid_argument"),
        (4, -1, "invalid_argument"),
        (4, float("nan"), "invalid_argument"),
        (4, "many", "invalid_argument"),
        (4, {"f1": 1, "f2": True, "f3": 1}, "invalid_argument"),
        (4, {"t1": 1}, "unknown_feature"),
        (4, {"f1": 1, "f2": 1, "f4": 1, "": 1}, "unknown_feature"),
    ],
)
def test_refuses_numbers_that_make_no_batch(batch_size: Any, lengths: Any, reason: str) -> None:
    with refused(reason, error=recfx.InputError):
        recfx.cost(hashed(), H100).at(batch_size, L=lengths)
