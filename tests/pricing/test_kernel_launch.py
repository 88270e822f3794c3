"""Lookups and fused steps on an Ascend chip take the time that a model of it says; elsewhere nothing changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchrec import EmbeddingCollection

import recfx
from recfx.kernels.build.chip_model import MIDDLE, modelled
from recfx.kernels.build.tiling import ASCEND_910B as CHIP
from recfx.planner.pricing.cost import Cost
from recfx.planner.pricing.hardware import ASCEND_910B, CPU_HOST, H100, Hardware
from recfx.planner.pricing.times import as_modelled, seconds_of_work
from recfx.planner.pricing.values import Values
from recfx.planner.pricing.work import NodeCost
from tests.builders.collections import one_table, sequence_table
from tests.builders.optimizers import attach

B, L, DIM, ROWS = 2048, 10, 64, 100_000
ALONE = replace(MIDDLE, launch=0.0)


def cost_of(
    hardware: Hardware, optimizer: str = "", dtype: torch.dtype = torch.float32, is_pooled: bool = True
) -> Cost:
    sequence = EmbeddingCollection([sequence_table("t", ["f"], rows=ROWS, dim=DIM)])
    model = (one_table(rows=ROWS, dim=DIM) if is_pooled else sequence).to(dtype)
    if optimizer:
        attach(model, optimizer)
    return recfx.cost(recfx.convert(model, backend="reference").train(bool(optimizer)), hardware)


def lookup(cost: Cost) -> NodeCost:
    return next(node for node in cost.nodes if node.kind == "lookup")


@pytest.mark.parametrize(("is_pooled", "kernel"), [(True, "recfx_pooled_lookup"), (False, "recfx_gather_rows")])
def test_a_lookup_takes_what_the_model_says(is_pooled: bool, kernel: str) -> None:
    cost = cost_of(ASCEND_910B, is_pooled=is_pooled)
    node = next(node for node in cost.at(B, L=L).nodes if node.kind == "lookup")
    expected = modelled(kernel, B * L, B if is_pooled else 0, DIM, 4, CHIP, ALONE).seconds
    assert node.seconds == pytest.approx(ASCEND_910B.node_overhead.value + expected, rel=0.02)


@pytest.mark.parametrize("is_pooled", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_step_takes_what_the_model_says(optimizer: str, is_pooled: bool) -> None:
    """And the ids are sorted, as on other hardware. Every id may be of a row of its own."""
    cost = cost_of(ASCEND_910B, optimizer, is_pooled=is_pooled)
    work = lookup(cost).backward.mapped(Values(B, 1, L, ["f"]).number)
    expected = modelled("recfx_fused_step", B * L, B * L, DIM, 4, CHIP, ALONE, optimizer).seconds
    rest = ASCEND_910B.node_overhead.value + B * L * ASCEND_910B.sort_per_id.value
    assert seconds_of_work(work, ASCEND_910B) == pytest.approx(rest + expected, rel=0.02)


@pytest.mark.parametrize("is_pooled", [True, False])
def test_other_hardware_has_no_model(is_pooled: bool) -> None:
    work = lookup(cost_of(H100, is_pooled=is_pooled)).forward
    assert work.launches
    assert as_modelled(work, H100) is as_modelled(work, CPU_HOST) is work
    assert as_modelled(work, ASCEND_910B, on_host=True) is work
    assert as_modelled(work, ASCEND_910B).launches == ()


def test_no_kernel_serves_tables_in_double_precision() -> None:
    assert lookup(cost_of(ASCEND_910B, dtype=torch.float64)).forward.launches == ()


def test_the_text_says_that_it_is_a_model() -> None:
    heading = str(cost_of(ASCEND_910B).at(B, L=L)).splitlines()[1]
    assert "for Ascend 910B (kernels modelled, assumptions: middle; not measured); " in heading
    assert "modelled" not in str(cost_of(H100).at(B, L=L))
