"""TorchRec's warm-up and clipping around optimizers that a checkpoint takes: a run resumes as if it had not stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import recfx
from tests.builders.batches import one_bag
from tests.builders.collections import tables_named
from tests.builders.optimizers import attach


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc: Any = tables_named("t")
        self.over = nn.Linear(self.ebc.embedding_bag_configs()[0].embedding_dim, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        total: torch.Tensor = self.over(self.ebc(features).values()).square().sum()
        return total


def stages() -> list[WarmupStage]:
    return [WarmupStage(WarmupPolicy.LINEAR, max_iters=2, value=0.25), WarmupStage(max_iters=8, value=0.5)]


def dense(model: Any) -> KeyedOptimizerWrapper:
    parameters = {f"over.{name}": each for name, each in model.over.named_parameters()}
    return KeyedOptimizerWrapper(parameters, lambda params: torch.optim.Adam(params, lr=0.1))


def clipped(model: Any) -> GradientClippingOptimizer:
    return GradientClippingOptimizer(dense(model), GradientClipping.NORM, max_gradient=0.05)


def fused(model: Any) -> Any:
    return model.ebc.fused_optimizer


def each_warm(model: Any) -> CombinedOptimizer:
    warm = WarmupOptimizer(clipped(model), stages(), lr=0.2)
    return CombinedOptimizer([("ebc", WarmupOptimizer(fused(model), stages())), ("", warm)])


def together(model: Any) -> CombinedOptimizer:
    return CombinedOptimizer([("ebc", fused(model)), ("", dense(model))])


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "clipping": clipped,
    "warm-up": lambda model: WarmupOptimizer(dense(model), stages()),
    "warm-up of clipping": lambda model: WarmupOptimizer(clipped(model), stages()),
    "clipping of warm-up": lambda model: GradientClippingOptimizer(WarmupOptimizer(dense(model), stages())),
    "fused alone": lambda model: WarmupOptimizer(fused(model), stages()),
    "each": each_warm,
    "around both": lambda model: WarmupOptimizer(together(model), stages()),
}


def build(wrapped: str) -> tuple[Any, Any]:
    model: Any = Model()
    attach(model.ebc, "adagrad")
    model = recfx.convert(model)
    return model, WRAPPED[wrapped](model)


def steps(model: Any, optimizer: Any, number: int) -> None:
    for step in range(number):
        model.over.zero_grad()
        model(one_bag(0, 1, step % 3, feature="t")).backward()
        optimizer.step()


def rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("taken", [0, 1, 4])
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_run_resumes(wrapped: str, taken: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, optimizer = build(wrapped)
    steps(model, optimizer, taken)
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    resumed, again = build(wrapped)
    steps(resumed, again, 6)  # further on in the schedule
    recfx.load_checkpoint(resumed, tmp_path, optimizer=again)
    for _ in range(4):
        assert rates(again) == rates(optimizer)
        for each in ((model, optimizer), (resumed, again)):
            steps(*each, 1)
        torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)
    recfx.save_checkpoint(resumed, tmp_path, optimizer=again)  # once more, with what was loaded


@pytest.mark.parametrize(("saved", "here"), [("each", "clipping"), ("clipping", "warm-up of clipping")])
def test_another_warm_up_than_was_saved(saved: str, here: str, tmp_path: Path) -> None:
    model, optimizer = build(saved)
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    other, again = build(here)
    before, found = rates(again), {name: each.clone() for name, each in other.state_dict().items()}
    with pytest.raises(recfx.CheckpointError, match="warm-ups were saved at") as caught:
        recfx.load_checkpoint(other, tmp_path, optimizer=again)
    assert (caught.value.reason, rates(again)) == ("checkpoint_mismatch", before)
    torch.testing.assert_close(dict(other.state_dict()), found, rtol=0, atol=0)


def test_a_warm_up_with_fewer_stages(tmp_path: Path) -> None:
    model, optimizer = build("warm-up")
    steps(model, optimizer, 12)
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    shorter = WarmupOptimizer(dense(model), stages()[:1])
    with pytest.raises(recfx.CheckpointError, match="in its stage 2, but here it has 2") as caught:
        recfx.load_checkpoint(model, tmp_path, optimizer=shorter)
    assert caught.value.reason == "checkpoint_mismatch"


def test_a_wrapper_of_which_nothing_is_known(tmp_path: Path) -> None:
    class Mine(OptimizerWrapper):
        pass

    model, _ = build("clipping")
    with pytest.raises(recfx.CheckpointError, match="optimizer= is a Mine") as caught:
        recfx.save_checkpoint(model, tmp_path, optimizer=Mine(dense(model)))
    assert caught.value.reason == "optimizer_not_supported"
