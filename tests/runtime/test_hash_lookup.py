"""``hash_lookup``: in which cases the node hashes first and looks up afterwards, seen from its ranges in a profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import recfx
from tests.builders.batches import one_bag
from tests.builders.collections import one_table
from tests.builders.optimizers import attach

PLAIN: dict[str, Any] = {}
EVICTS = {"on_full": "evict"}
ADMITS = {"admit_after": 2}


def trained(config: dict[str, Any]) -> Any:
    plain = one_table()
    attach(plain, "sgd")
    model = recfx.convert(torch.nn.ModuleDict({"ebc": plain}), hashing=recfx.HashConfig(dense_rows=0, **config))
    model["ebc"](one_bag(1, 2, 1, 2)).values().sum().backward()
    return model["ebc"]


def ranges(run: Any) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    names = [event.name for event in profiled.events() if event.name.startswith("ebc_")]
    return [name.removeprefix("ebc_") for name in names]


ONE_STEP, TWO_STEPS = ["hash_lookup"], ["hash_lookup", "hash_ids", "lookup"]


@pytest.mark.parametrize(
    ("config", "training", "grad_mode", "steps"),
    [
        (PLAIN, True, True, ONE_STEP),
        (PLAIN, False, True, ONE_STEP),
        (PLAIN, False, False, ONE_STEP),
        (EVICTS, True, True, TWO_STEPS),
        (EVICTS, False, True, TWO_STEPS),
        (EVICTS, False, False, ONE_STEP),
        (ADMITS, True, False, TWO_STEPS),
        (ADMITS, False, True, ONE_STEP),
    ],
)
def test_what_one_kernel_can_do_takes_one_step(
    config: dict[str, Any], training: bool, grad_mode: bool, steps: list[str]
) -> None:
    model = trained(config).train(training)
    with torch.set_grad_enabled(grad_mode):
        found = ranges(lambda: model(one_bag(1, 2)))
    assert [name for name in found if name not in ("select_features", "keyed_tensor")] == steps


def test_a_forward_that_is_run_again_takes_two_steps() -> None:
    model = trained(PLAIN)
    scale = torch.ones(1, requires_grad=True)
    output = checkpoint(lambda scale: model(one_bag(1, 2)).values() * scale, scale, use_reentrant=False)
    found = ranges(lambda: output.sum().backward())
    assert [name for name in found if name not in ("select_features", "keyed_tensor")] == [
        *TWO_STEPS, "hash_lookup (backward)", "hash_lookup (step)",
    ]  # fmt: skip
