"""What is measured of this machine is what trains: lookups that step their tables inside the backward."""

from __future__ import annotations

import pytest
import torch

from recfx.hashing import HashConfig
from recfx.ir import format_graph
from recfx.planner.pricing.this_machine import _Measured


@pytest.mark.parametrize("dense_rows", [64, 0])
def test_the_backward_steps_the_tables(dense_rows: int) -> None:
    """Without fused optimizers, it would be the time of gradients as large as the tables."""
    measured = _Measured(HashConfig(dense_rows=dense_rows), "lookup" if dense_rows else "hash_lookup", 64, 4)
    weights = {name: measured.collection.weight(f"t{name}") for name in measured.names}
    assert "optimizer=sgd" in format_graph(measured.collection.graph_module)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    assert measured.seconds(256, backward=True) > 0
    assert not any(torch.equal(weights[name], before[name]) for name in measured.names)
