"""Graphs of operators are data: they do not run, can be pickled, and are read from text that is checked."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from recfx.ir import operators


def test_an_operator_does_not_run_but_leaves_itself_in_a_trace() -> None:
    with pytest.raises(RuntimeError, match="lookup is an operator of a graph"):
        operators.OPERATORS["lookup"](torch.ones(1), collection="")

    def model(ids: torch.Tensor) -> torch.Tensor:
        looked_up: torch.Tensor = operators.OPERATORS["lookup"](ids, collection="a", tables=("t",), combine="SUM")
        return looked_up

    graph = fx.symbolic_trace(model).graph
    (node,) = [candidate for candidate in graph.nodes if operators.kind_of(candidate) is not None]
    assert node.kwargs == {"collection": "a", "tables": ("t",), "combine": "SUM"}
