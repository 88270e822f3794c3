"""Ordinary optimizers: which can be saved, how what ranks say is joined, what is kept when one refuses its state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torchrec import KeyedJaggedTensor
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import recfx
from tests.builders.batches import one_bag
from tests.builders.collections import tables_named
from tests.builders.optimizers import attach
from tests.checkpoint.training import RAW, OnePart, batch
from tests.support.refusals import refused


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    optimizer.zero_grad()
    model(torch.full((4, 3), float(number + 1))).square().sum().backward()
    optimizer.step()


def wrapped(model: nn.Module, prefix: str = "") -> KeyedOptimizerWrapper:
    named = {name: parameter for name, parameter in model.named_parameters() if name.startswith(prefix)}
    return KeyedOptimizerWrapper(named, lambda parameters: torch.optim.Adam(parameters, lr=0.1))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            CombinedOptimizer([("a", wrapped(layers(), "0")), ("b", wrapped(layers(), "1"))]),
            "has 2 optimizers that are",
        ),
        (KeyedOptimizer({"a": nn.Parameter(torch.ones(1))}, {}, [{"params": []}]), "optimizer= is a KeyedOptimizer"),
        (3, "optimizer= is an int"),
        ([wrapped(layers(), "0")], "optimizer= is a list"),
        (StepLR(torch.optim.SGD(layers().parameters()), 1), "optimizer= is a StepLR"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, optimizer: Any, message: str) -> None:
    for call in (recfx.save_checkpoint, recfx.load_checkpoint):
        if call is recfx.load_checkpoint:
            recfx.save_checkpoint(layers(), tmp_path)
        with refused("optimizer_not_supported", error=recfx.CheckpointError) as caught:
            call(layers(), tmp_path, optimizer=optimizer)
        assert message in caught.value.message


def test_optimizers_that_are_all_fused_are_saved_with_the_model(tmp_path: Path) -> None:
    model: Any = layers()
    recfx.save_checkpoint(model, tmp_path, optimizer=EmptyFusedOptimizer())
    recfx.load_checkpoint(model, tmp_path, optimizer=EmptyFusedOptimizer())
    with pytest.raises(recfx.CheckpointError, match="lacks an optimizer of "):
        recfx.load_checkpoint(model, tmp_path, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("ordinary", [torch.optim.Adagrad, torch.optim.Adam])
def test_an_optimizer_that_also_has_the_tables(tmp_path: Path, ordinary: Any) -> None:
    """Scripts pass all parameters; those with an optimizer in backward have no gradient left."""

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = tables_named("t")
        attach(model, torch.optim.Adagrad)
        model = recfx.convert(model)
        return model, ordinary(model.parameters(), lr=0.1)

    def losses(model: nn.Module, optimizer: Any) -> list[float]:
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(one_bag(0, 1, feature="t")).values().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    model, optimizer = build()
    losses(model, optimizer)
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    other = build()
    recfx.load_checkpoint(other[0], tmp_path, optimizer=other[1])
    assert losses(*other) == losses(model, optimizer)


def test_a_saved_optimizer_that_is_not_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    recfx.save_checkpoint(model, tmp_path / "with", optimizer=optimizer)
    recfx.save_checkpoint(model, tmp_path / "without")
    recfx.load_checkpoint(model, tmp_path / "with", optimizer=optimizer)
    recfx.load_checkpoint(model, tmp_path / "with", in_backward=False)
    recfx.load_checkpoint(model, tmp_path / "without")
    assert _logged(caplog) == []
    for fused in (None, EmptyFusedOptimizer()):
        caplog.clear()
        recfx.load_checkpoint(model, tmp_path / "with", optimizer=fused)
        (message,) = _logged(caplog)
        assert message.startswith("[optimizer_not_loaded] optimizer: the checkpoint has an Adam, whose state was not ")
        assert "load again with optimizer=" in message


def _logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "recfx"]


def test_parameters_without_a_state_before_others(tmp_path: Path) -> None:
    """The first layer was frozen; parameters have names."""
    states = []
    for _ in range(2):
        model = layers()
        model[0].requires_grad_(False)  # type: ignore[operator]
        optimizer = torch.optim.Adam(model.named_parameters(), lr=0.1)
        if states:
            recfx.load_checkpoint(model, tmp_path, optimizer=optimizer)
        else:
            step(model, optimizer)
            recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
        states.append(optimizer.state_dict()["state"])
    assert states[0].keys() == states[1].keys() == {2, 3}
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


def test_settings_that_only_one_of_them_has(tmp_path: Path) -> None:
    model = layers()
    saved, target = (torch.optim.Adam(model.parameters(), lr=rate) for rate in (0.1, 0.2))
    saved.param_groups[0]["initial_lr"] = 0.5  # a scheduler's
    del saved.param_groups[0]["amsgrad"]
    recfx.save_checkpoint(model, tmp_path, optimizer=saved)
    target.param_groups[0].update(amsgrad=True, note=3)
    recfx.load_checkpoint(model, tmp_path, optimizer=target)
    group = target.param_groups[0]
    assert (group["lr"], group["initial_lr"], group["amsgrad"]) == (0.1, 0.5, True)
    assert "note" not in group


class Refuses(torch.optim.Adam):
    """Takes its state, and then does not like it."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise ValueError("not this one")


@pytest.mark.parametrize("in_wrapper", [False, True])
def test_an_optimizer_that_refuses_its_state_keeps_what_it_had(tmp_path: Path, in_wrapper: bool) -> None:
    def build(kind: Any) -> tuple[nn.Module, Any]:
        model = layers()
        if in_wrapper:
            return model, KeyedOptimizerWrapper(dict(model.named_parameters()), lambda p: kind(p, lr=0.1))
        return model, kind(model.parameters(), lr=0.1)

    Named = type("Refuses", (torch.optim.Adam,), {})  # saved under the same name
    model, optimizer = build(Named)
    step(model, optimizer)
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    model, optimizer = build(Refuses)
    step(model, optimizer, 3)
    step(model, optimizer, 4)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state, groups = optimizer.state, optimizer.param_groups
    with pytest.raises(
        recfx.CheckpointError, match=r"the optimizer does not accept what was saved \(ValueError"
    ) as caught:
        recfx.load_checkpoint(model, tmp_path, optimizer=optimizer)
    assert (caught.value.reason, caught.value.module_path) == ("checkpoint_mismatch", "optimizer")
    assert optimizer.state is state
    assert optimizer.param_groups is groups
    assert all(float(entry["step"]) == 2 for entry in state.values())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_the_state_of_a_table_that_has_grown_stays_behind(tmp_path: Path) -> None:
    """Only fused optimizers follow their rows."""

    def build(rows: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(rows)
        model: Any = recfx.convert(OnePart(rows), hashing=RAW)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = build(40)
    model(batch(0)).sum().backward()
    optimizer.step()
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    same, its_optimizer = build(40)
    recfx.load_checkpoint(same, tmp_path, optimizer=its_optimizer)
    bigger, its_optimizer = build(60)
    before = {name: value.clone() for name, value in bigger.state_dict().items()}
    with pytest.raises(recfx.CheckpointError, match="has one entry per row of its table") as caught:
        recfx.load_checkpoint(bigger, tmp_path, optimizer=its_optimizer)
    assert (caught.value.reason, caught.value.module_path) == ("checkpoint_mismatch", "first.embedding_bags.a.weight")
    assert all(torch.equal(value, before[name]) for name, value in bigger.state_dict().items())
    recfx.load_checkpoint(bigger, tmp_path)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc: Any = tables_named("t")
        self.over = nn.Linear(self.ebc.embedding_bag_configs()[0].embedding_dim, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values()).square().sum()


def stages() -> list[WarmupStage]:
    return [WarmupStage(WarmupPolicy.LINEAR, max_iters=2, value=0.25), WarmupStage(max_iters=8, value=0.5)]


def dense(model: Any) -> KeyedOptimizerWrapper:
    parameters = {f"over.{name}": parameter for name, parameter in model.over.named_parameters()}
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
        for pair in ((model, optimizer), (resumed, again)):
            steps(*pair, 1)
        torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)
    recfx.save_checkpoint(resumed, tmp_path, optimizer=again)  # once more, with what was loaded


@pytest.mark.parametrize(("saved", "here"), [("each", "clipping"), ("clipping", "warm-up of clipping")])
def test_another_warm_up_than_was_saved(saved: str, here: str, tmp_path: Path) -> None:
    model, optimizer = build(saved)
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    target, again = build(here)
    before, kept = rates(again), {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(recfx.CheckpointError, match="warm-ups were saved at") as caught:
        recfx.load_checkpoint(target, tmp_path, optimizer=again)
    assert (caught.value.reason, rates(again)) == ("checkpoint_mismatch", before)
    torch.testing.assert_close(dict(target.state_dict()), kept, rtol=0, atol=0)


def test_a_warm_up_with_fewer_stages(tmp_path: Path) -> None:
    model, optimizer = build("warm-up")
    steps(model, optimizer, 12)
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    shorter = WarmupOptimizer(dense(model), stages()[:1])
    with refused("checkpoint_mismatch", match="or shorter", error=recfx.CheckpointError):
        recfx.load_checkpoint(model, tmp_path, optimizer=shorter)
