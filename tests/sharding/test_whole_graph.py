"""Sharded collections under tracers, on real ranks: inside whole-model graphs, the nodes of communication are the
graph's own; for torch.fx, a collection is one leaf call, whose result is awaited where it is used.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec.fx
from torch import nn

import recfx
from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from tests.sharding import cases
from tests.sharding.cases import Case, Model, batches, model_parallel
from tests.sharding.ranks import on_ranks
from tests.sharding.stateful import gather
from tests.sharding.typical_cases import FOUR, FOUR_LARGER
from tests.support.refusals import refused

CASE = Case(FOUR, optimizer="adagrad", sizes=(3, 4))
RAW = Case(FOUR_LARGER, hashing=recfx.HashConfig(dense_rows=0, buckets=4), raw_ids=20, sizes=(3, 4))
EMPTY = Case(FOUR, sizes=(3, 0))
model_and_plan = partial(cases.model_and_plan, is_converted=False)


@pytest.mark.parametrize("case", [RAW, EMPTY], ids=["raw", "empty_batch"])
@on_ranks(2)
def test_trace_shows_the_nodes_of_communication(rank: int, world_size: int, case: Case) -> None:
    model, plan = model_and_plan(case, world_size)
    (batch,) = (step[rank] for step in batches(case, world_size, 1))
    model = recfx.convert(model, hashing=case.hashing, plan=plan)
    before = {name: gather(value) for name, value in model.state_dict().items()}
    graph = recfx.trace(model, (batch,))
    after = {name: gather(value) for name, value in model.state_dict().items()}
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not any(len(index) for index in model.sparse.hash_indexes.values())  # what was compared were copies
    output, expected = (module.eval()(batch) for module in (graph, model))
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)
    alone = recfx.trace(model.sparse, (batch,))
    assert alone is model.sparse.graph_module
    nodes = ["select_features", "bucketize", "input_dist_start", "input_dist_wait", "lookup", "output_dist_start"]
    nodes += ["output_dist_wait", "mean_divide", "keyed_tensor"] + (["hash_ids"] if case.hashing else [])
    for node in nodes:
        assert f"sparse_{node} = self.sparse.graph_module.{node}(" in graph.code
    assert "over" in [node.name for node in graph.graph.nodes]


@pytest.mark.parametrize("case", [CASE, RAW], ids=["adopted", "raw"])
@on_ranks(2)
def test_a_whole_graph_trains_as_the_python_model(rank: int, world_size: int, case: Case) -> None:
    answers = []
    for whole_graph in (False, True):
        model, plan = model_and_plan(case, world_size)
        steps = [step[rank] for step in batches(case, world_size, 3)]
        model = recfx.convert(model, (steps[0],), hashing=case.hashing, plan=plan, whole_graph=whole_graph)
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "over" in name], lr=0.1)
        losses = []
        for batch in steps:
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        model.eval()
        answers.append((losses, model(steps[0]), dict(model.module.named_parameters())))
        sparse = model.module.get_submodule("sparse")
        assert isinstance(sparse, ShardedHashEmbeddingBagCollection)
    torch.testing.assert_close(answers[1], answers[0], rtol=0, atol=0)


class Branching(Model):
    """Cannot be traced: its path depends on values."""

    def forward(self, features: Any) -> Any:
        loss, pooled = super().forward(features)
        return (loss * 2, pooled) if loss > 100 else (loss, pooled)


@on_ranks(2)
def test_a_model_that_cannot_be_traced_says_so_on_every_rank(rank: int, world_size: int) -> None:
    model, plan = model_and_plan(CASE, world_size)
    branching = Branching(model.sparse, model.over.in_features)
    (batch,) = (step[rank] for step in batches(CASE, world_size, 1))
    converted = recfx.convert(branching, (batch,), plan=plan)
    for action in (
        lambda: recfx.trace(converted, (batch,)),
        lambda: recfx.convert(branching, (batch,), plan=plan, whole_graph=True),
    ):
        with refused("untraceable_root"):
            action()
    dist.barrier()
    converted(batch)[0].backward()


@on_ranks(2)
def test_a_model_in_distributed_model_parallel_is_traced(rank: int, world_size: int) -> None:
    model, plan = model_and_plan(CASE, world_size)
    (batch,) = (step[rank] for step in batches(CASE, world_size, 1))
    wrapped = model_parallel(recfx.convert(model), plan)
    assert recfx.convert(wrapped) is wrapped
    with refused("already_sharded"):
        recfx.convert(wrapped, plan=plan)
    code = recfx.trace(wrapped, (batch,)).code
    assert "sparse_input_dist_start = self.sparse.graph_module.input_dist_start(" in code


@on_ranks(2)
def test_what_is_sharded_is_converted_and_stays_as_it_is(rank: int, world_size: int) -> None:
    model, plan = model_and_plan(CASE, world_size)
    (batch,) = (step[rank] for step in batches(CASE, world_size, 1))
    original = copy.deepcopy(model)
    sharded = recfx.convert(model, (batch,), plan=plan)
    assert recfx.convert(sharded) is sharded
    assert recfx.convert(sharded, (batch,)) is sharded
    assert recfx.convert(nn.parallel.DistributedDataParallel(sharded), (batch,)).module is sharded
    with refused("already_sharded", "sparse"):
        recfx.convert(sharded, plan=plan)
    with refused("already_converted", "sparse"):
        recfx.convert(sharded, hashing=recfx.HashConfig(dense_rows=0))
    with refused("sharded_model", "sparse") as caught:
        recfx.verify(original, sharded, (batch,))
    assert "plan=" in caught.value.what_to_do
    duplicate = copy.deepcopy(sharded)
    loss, _ = duplicate(batch)
    loss.backward()
    for name, parameter in sharded.named_parameters():
        assert (name == "over.weight" or name == "over.bias") or not torch.equal(
            parameter, duplicate.get_parameter(name)
        ), name


# The tracers of torch and TorchRec


def sharded(case: Case, world_size: int, form: str) -> nn.Module:
    if form == "convert":
        model, plan = model_and_plan(case, world_size)
        return recfx.convert(model, hashing=case.hashing, plan=plan)
    # A DistributedDataParallel, which DistributedModelParallel would put around the layer, cannot be traced.
    return model_parallel(*cases.model_and_plan(case, world_size), init_data_parallel=False)


@pytest.mark.parametrize(
    ("case", "form", "tracer", "path"),
    [
        (CASE, "convert", "torch", "sparse"),
        (RAW, "convert", "torch", "sparse"),
        (RAW, "convert", "torchrec", "sparse"),
        (CASE, "wrapped", "torchrec", "_dmp_wrapped_module.sparse"),
    ],
)
@on_ranks(2)
def test_a_sharded_collection_is_one_leaf(
    rank: int, world_size: int, case: Case, form: str, tracer: str, path: str
) -> None:
    """The modules that the traced graph calls; the graph runs and trains as the model."""
    trace = {"torch": torch.fx.symbolic_trace, "torchrec": torchrec.fx.symbolic_trace}[tracer]
    reference, model = (sharded(case, world_size, form) for _ in range(2))
    graph = trace(model)
    for step in batches(case, world_size, 2):
        expected, outputs = reference(step[rank]), graph(step[rank])
        torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
        expected[0].backward()
        outputs[0].backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    assert [call for call in calls if "sparse" in call] == [path]


@on_ranks(2)
def test_graphs_are_made_after_sharding(rank: int, world_size: int) -> None:
    """They would go on with the unsharded tables, and the shards would not be trained."""
    model, plan = model_and_plan(CASE, world_size)
    (batch,) = (step[rank] for step in batches(CASE, world_size, 1))
    model = recfx.convert(model, (batch,))
    for graph in (recfx.trace(model, (batch,)), recfx.convert(model, (batch,), whole_graph=True)):
        with refused("traced_graph"):
            model_parallel(graph, plan)
