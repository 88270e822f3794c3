"""The state of a parameter goes to whatever steps it: from an optimizer in backward to an ordinary one, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch

import recfx
from tests.builders.optimizers import attach
from tests.checkpoint.training import KINDS, RAW, OnePart, assert_same, batch
from tests.support.refusals import refused

TABLE = "first.embedding_bags.a.weight"


def build(
    stepped: str, kind: str = "adam", attached: str = "", rows: int = 40, seed: int = 0, **settings: Any
) -> tuple[Any, Any]:
    """A hashed table that is stepped "in_backward", by an "ordinary" optimizer, or in a "group" of its own there.

    ``attached``: the kind of the optimizer in backward, if it is another one.
    """
    torch.manual_seed(seed)
    model: Any = recfx.convert(OnePart(rows), hashing=RAW)
    table, dense = model.first.weight("a"), model.after.weight
    if stepped == "in_backward":
        optimizer, defaults = KINDS[attached or kind]
        attach([table], optimizer, **{**defaults, **settings})
    groups = {"in_backward": [[dense]], "ordinary": [[dense, table]], "group": [[dense], [table]]}[stepped]
    make: Any = KINDS[kind][0]
    return model, make([{"params": group} for group in groups], **KINDS[kind][1])


def step(model: Any, optimizer: Any, number: int = 0) -> None:
    optimizer.zero_grad()
    model(batch(number)).square().sum().backward()
    optimizer.step()


def saved_by(directory: Path, stepped: str, kind: str = "adam", steps: int = 1, **arguments: Any) -> tuple[Any, Any]:
    model, optimizer = build(stepped, kind, **arguments)
    for _ in range(steps):
        step(model, optimizer)
    recfx.save_checkpoint(model, directory, optimizer=optimizer)
    return model, optimizer


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """The state of the table, whoever has it; SGD's has nothing in it, or None."""
    weight = model.first.weight("a")
    fused = model.first.fused_optimizers().get("a")
    state = optimizer.state[weight] if fused is None else fused.state
    return {key: value.clone() for key, value in state.items() if value is not None} | {"weight": weight.detach()}


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "recfx"]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("then", "now"),
    [("in_backward", "ordinary"), ("ordinary", "in_backward"), ("in_backward", "group"), ("group", "in_backward")],
)
def test_state_and_steps_go_to_what_steps_the_table(
    then: str, now: str, kind: str, steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = saved_by(tmp_path, then, kind, steps)
    target = build(now, kind, seed=1)
    step(*target, 5)
    recfx.load_checkpoint(target[0], tmp_path, optimizer=target[1])
    assert logged(caplog) == []
    if steps:
        assert_same(state_of(*target), state_of(*source))
        assert kind == "sgd" or float(state_of(*target)["step"]) == 2
    for pair in (source, target):
        step(*pair)
        step(*pair)
    for name, value in state_of(*source).items():  # the same ids in each step, so dense rules do the same
        torch.testing.assert_close(state_of(*target)[name], value, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_that_was_saved_without_optimizer(tmp_path: Path) -> None:
    """All that the optimizer steps here was stepped in backward."""
    source = saved_by(tmp_path, "in_backward")
    recfx.save_checkpoint(source[0], tmp_path)
    model, _ = build("ordinary", seed=1)
    optimizer = torch.optim.Adam([model.first.weight("a")], lr=0.5)
    recfx.load_checkpoint(model, tmp_path, optimizer=optimizer)
    assert_same(state_of(model, optimizer), state_of(*source))
    assert optimizer.param_groups[0]["lr"] == 0.01
    with refused("checkpoint_mismatch", match="lacks an optimizer of ", error=recfx.CheckpointError):
        recfx.load_checkpoint(model, tmp_path, optimizer=torch.optim.Adam(model.parameters()))


def test_optimizers_in_backward_that_are_left_alone(tmp_path: Path) -> None:
    saved_by(tmp_path, "ordinary")
    model, optimizer = build("in_backward", seed=1)
    step(model, optimizer)
    before = state_of(model, optimizer)
    recfx.load_checkpoint(model, tmp_path, optimizer=optimizer, in_backward=False)
    assert torch.equal(state_of(model, optimizer)["exp_avg"], before["exp_avg"])


def test_rows_move_to_a_fused_optimizer(tmp_path: Path) -> None:
    source = saved_by(tmp_path, "ordinary")
    target = build("in_backward", rows=60)
    recfx.load_checkpoint(target[0], tmp_path, optimizer=target[1])
    ids, old = source[0].first.index("a").items()
    new = target[0].first.index("a").find(ids)
    assert torch.equal(state_of(*target)["exp_avg"][new], state_of(*source)["exp_avg"][old])


@pytest.mark.parametrize("now", ["ordinary", "group"])
def test_settings_of_a_group(now: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A group of tables alone goes on with theirs; in a group with others, the table has those of the group."""
    model, optimizer = saved_by(tmp_path, "in_backward", eps=1e-3)
    model.first.fused_optimizers()["a"].group["lr"] = 0.5
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    target = build(now, seed=1)
    recfx.load_checkpoint(target[0], tmp_path, optimizer=target[1])
    group = target[1].param_groups[-1]
    if now == "group":
        assert (group["lr"], group["eps"], logged(caplog)) == (0.5, 1e-3, [])
        return
    assert (group["lr"], group["eps"]) == (0.01, 1e-8)
    (message,) = logged(caplog)
    assert message.startswith(f"[optimizer_settings_differ] optimizer: {TABLE} ")
    assert "eps, lr" in message


def test_settings_go_to_the_fused_optimizer(tmp_path: Path) -> None:
    model, optimizer = saved_by(tmp_path, "ordinary")
    optimizer.param_groups[0]["lr"] = 0.5  # a schedule's
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    target = build("in_backward", seed=1)
    recfx.load_checkpoint(target[0], tmp_path, optimizer=target[1])
    assert target[0].first.fused_optimizers()["a"].group["lr"] == 0.5


def test_an_optimizer_in_backward_of_which_nothing_was_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = saved_by(tmp_path, "ordinary")
    recfx.save_checkpoint(model, tmp_path)
    target = build("in_backward", seed=1)
    step(*target)
    recfx.load_checkpoint(target[0], tmp_path)
    assert float(state_of(*target)["exp_avg"].abs().sum()) == float(state_of(*target)["step"]) == 0
    (message,) = logged(caplog)
    assert message.startswith("[optimizer_state_missing] optimizer: ")
    assert TABLE in message


@pytest.mark.parametrize(
    ("then", "now", "kind", "attached", "settings", "match"),
    [
        ("in_backward", "group", "adagrad", "rowwise_adagrad", {}, "optimizer is rowwise_adagrad, this one is adagrad"),
        ("group", "in_backward", "adagrad", "rowwise_adagrad", {}, "optimizer is adagrad, this one is rowwise_adagrad"),
        ("ordinary", "in_backward", "adam", "sgd", {}, "optimizer is adam, this one is sgd"),
        ("ordinary", "in_backward", "adam", "", {"amsgrad": True}, "saved with amsgrad=True, which has no fused form"),
        ("ordinary", "in_backward", "sgd", "", {"momentum": 0.5}, "saved with momentum=0.5, which has no fused form"),
        ("ordinary", "in_backward", "adagrad", "", {"lr_decay": 0.5}, "saved with lr_decay=0.5"),
    ],
)
def test_what_cannot_be_carried(
    then: str, now: str, kind: str, attached: str, settings: dict[str, Any], match: str, tmp_path: Path
) -> None:
    model, optimizer = build(then, kind, attached)
    for group in optimizer.param_groups:
        group.update(settings)
    step(model, optimizer)
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    target = build(now, kind, attached, seed=1)
    before = {name: value.clone() for name, value in target[0].state_dict().items()}
    with refused("checkpoint_mismatch", match=match, error=recfx.CheckpointError) as caught:
        recfx.load_checkpoint(target[0], tmp_path, optimizer=target[1])
    assert caught.value.module_path == TABLE
    assert_same(dict(target[0].state_dict()), before)


@pytest.mark.parametrize("then", ["in_backward", "ordinary"])
def test_a_table_that_nothing_steps_here(then: str, tmp_path: Path) -> None:
    """Its state would be lost."""
    saved_by(tmp_path, then)
    model: Any = recfx.convert(OnePart(40), hashing=RAW)
    optimizer = torch.optim.Adam([model.after.weight])
    with refused("checkpoint_mismatch", match=TABLE, error=recfx.CheckpointError):
        recfx.load_checkpoint(model, tmp_path, optimizer=optimizer)
