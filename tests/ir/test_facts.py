"""Facts are values: equal ones are one."""

from __future__ import annotations

import torch

from recfx.ir.context import OptimizerFacts, TableFacts


def test_they_are_compared_by_value() -> None:
    def made(decay: float) -> TableFacts:
        return TableFacts(10, 4, torch.float32, "npu", optimizer=OptimizerFacts("sgd", (("weight_decay", decay),)))

    assert len({made(0), made(0.0), made(0.1)}) == 2
