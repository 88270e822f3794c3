"""Facts are values: equal ones are one, and nothing that lives is behind them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from recfx.ir import facts
from recfx.ir.facts import OptimizerFacts, TableFacts
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules.adam import ADAM
from recfx.optim.rules.sgd import SGD


def test_they_are_compared_by_value() -> None:
    def made(decay: float) -> TableFacts:
        return TableFacts(10, 4, torch.float32, "npu", optimizer=OptimizerFacts("sgd", (("weight_decay", decay),)))

    assert len({made(0), made(0.0), made(0.1)}) == 2


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.2)], ids=["number", "tensor"])
def test_the_learning_rate_is_no_fact_of_an_optimizer(rate: object) -> None:
    assert FusedOptimizer(SGD, {"lr": rate}).facts == OptimizerFacts("sgd", (("weight_decay", 0.0),))


def test_settings_are_data_whatever_torch_and_files_made_of_them() -> None:
    as_files_have_it = FusedOptimizer(ADAM, {"lr": 0.1, "betas": [0.5, 0.75], "eps": torch.tensor(0.25)})
    found = as_files_have_it.facts
    assert found.group == (("betas", (0.5, 0.75)), ("eps", 0.25), ("weight_decay", 0.0))
    assert {found} == {FusedOptimizer(ADAM, {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.25}).facts}


def test_nothing_that_lives_is_imported() -> None:
    """No module, store, device, kernel or optimizer: dtypes are all that torch is there for."""
    found = set()
    for node in ast.walk(ast.parse(Path(facts.__file__).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    assert found == {"__future__", "collections.abc", "dataclasses", "torch"}
