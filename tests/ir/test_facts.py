"""Facts are values: equal ones are one, and nothing that lives is behind them."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from recfx.ir import facts
from recfx.ir.facts import OptimizerFacts, TableFacts


def test_they_are_compared_by_value() -> None:
    def made(decay: float) -> TableFacts:
        return TableFacts(10, 4, torch.float32, "npu", optimizer=OptimizerFacts("sgd", (("weight_decay", decay),)))

    assert len({made(0), made(0.0), made(0.1)}) == 2


def test_nothing_that_lives_is_imported() -> None:
    """No module, store, device, kernel or optimizer: dtypes are all that torch is there for."""
    imported = set()
    for node in ast.walk(ast.parse(Path(facts.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    assert imported == {"__future__", "collections.abc", "dataclasses", "functools", "recfx.ir.tables", "torch"}
