"""One name everywhere: a profile shows the graph's node names."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torchrec import KeyedJaggedTensor

import recfx
from recfx.lowering.step import profiler_ranges
from tests.builders.batches import one_bag
from tests.builders.collections import one_table
from tests.builders.optimizers import attach


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = torch.nn.ModuleDict({"ebc": one_table()})

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.sparse["ebc"](features).values()


def test_profiler_ranges_are_node_names() -> None:
    converted = recfx.convert(Model(), hashing=recfx.HashConfig(dense_rows=0))
    batch = one_bag(1, 2)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        converted(batch)
    names = {node.name for node in converted.sparse["ebc"].graph_module.graph.nodes if node.op == "call_module"}
    assert names == {"sparse_ebc_select_features", "sparse_ebc_hash_lookup", "sparse_ebc_keyed_tensor"}
    assert names <= {event.key for event in profiled.key_averages()}


@pytest.mark.parametrize(("backend", "is_fused"), [("cpu", True), ("reference", True), ("cpu", False)])
def test_the_backward_and_the_step_have_the_node_s_name(backend: str, is_fused: bool) -> None:
    """A lookup without an optimizer has a backward alone."""
    model = Model()
    if is_fused:
        attach(model, torch.optim.SGD, lr=0.1)
    converted = recfx.convert(model, backend=backend)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(2):
            converted(one_bag(1, 2)).sum().backward()
    counts = {event.key: event.count for event in profiled.key_averages() if event.key.startswith("sparse_ebc_lookup")}
    ranges = ["", " (backward)", *([" (step)"] if is_fused else [])]
    assert counts == {f"sparse_ebc_lookup{suffix}": 2 for suffix in ranges}


def test_there_are_no_ranges_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    attach(model, torch.optim.SGD, lr=0.1)
    converted = recfx.convert(model)
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: pytest.fail(f"a range {name}"))
    converted(one_bag(1, 2)).sum().backward()
    assert profiler_ranges.running_node() == ""
