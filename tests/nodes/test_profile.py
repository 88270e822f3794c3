"""One name everywhere: a profile shows the graph's node names."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile
from torchrec import KeyedJaggedTensor

import recfx
from tests.builders.batches import one_bag
from tests.builders.collections import one_table


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
    assert names == {
        "sparse_ebc_select_features",
        "sparse_ebc_hash_lookup",
        "sparse_ebc_keyed_tensor",
    }
    assert names <= {event.key for event in profiled.key_averages()}
