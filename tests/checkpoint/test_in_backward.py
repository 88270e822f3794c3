"""Optimizers in backward, fused or not: what comes back, into which objects, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recfx
from recfx.checkpoint.optimizers import attached_to, fused_tables
from tests.builders.optimizers import attach
from tests.checkpoint.crafted import change_settings, change_tensors
from tests.checkpoint.training import RAW, OnePart, assert_same, batch

TABLE = "first.embedding_bags.a.weight"


class Counting(torch.optim.Optimizer):
    """Keeps a number, and a tensor that grows, for every parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["history"] = torch.cat([state.get("history", torch.empty(0)), torch.ones(1)])
                parameter.data.sub_(group["lr"] * parameter.grad)


def build(
    optimizer: Any = torch.optim.Adam, rows: int = 40, seed: int = 0, tables: bool = True, **settings: Any
) -> Any:
    """A hashed table with one optimizer in backward; Adam and SGD with momentum on the bias, Counting on the rest."""
    torch.manual_seed(seed)
    model: Any = recfx.convert(OnePart(rows), hashing=RAW)
    if tables:
        attach([model.first.weight("a")], optimizer, **settings)
    attach([model.after.bias], torch.optim.Adam, lr=0.01)
    attach([model.after.bias], torch.optim.SGD, lr=0.01, momentum=0.9)
    attach([model.after.weight], Counting, lr=0.125)
    return model


def steps(model: Any, *numbers: int) -> None:
    for number in numbers:
        model(batch(number)).square().sum().backward()


def states(model: nn.Module) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Settings and state of all optimizers in backward, by name."""
    of_tables = {table.weight: (fused.group, fused.state) for table, fused in fused_tables(model)}
    others = {name: (each.param_groups[0], each.state[weight]) for name, weight, each in attached_to(model)}
    return {**of_tables, **others}


def all_state(model: nn.Module) -> dict[str, Any]:
    """Weights, and settings and state of all optimizers, copied."""
    state: dict[str, Any] = dict(model.state_dict())
    for name, (settings, of_parameter) in states(model).items():
        values = {**{key: value for key, value in settings.items() if key != "params"}, **of_parameter}
        state.update({f"{name}.{key}": value for key, value in values.items()})
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def refused(model: nn.Module, directory: Path) -> recfx.CheckpointError:
    before = all_state(model)
    with pytest.raises(recfx.CheckpointError) as caught:
        recfx.load_checkpoint(model, directory)
    assert_same(all_state(model), before)
    assert caught.value.reason == "checkpoint_mismatch"
    return caught.value


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.NAdam], ids=["fused", "not_fused"])
def test_optimizers_of_every_kind_beside_each_other(tmp_path: Path, optimizer: type[torch.optim.Optimizer]) -> None:
    source, target = build(optimizer), build(optimizer, seed=1)
    assert list(states(source)) == [TABLE, "after.weight", "after.bias", "after.bias#1"]
    steps(source, 0, 1)
    steps(target, 5)
    recfx.save_checkpoint(source, tmp_path)
    recfx.load_checkpoint(target, tmp_path)
    expected = all_state(source)
    assert expected["after.weight.count"] == 2
    assert expected["after.weight.history"].numel() == 2
    assert float(expected["after.bias.step"]) == 2
    assert "after.bias#1.momentum_buffer" in expected
    assert_same(all_state(target), expected)
    steps(source, 2)
    steps(target, 2)
    assert_same(all_state(target), all_state(source))


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.NAdam], ids=["fused", "not_fused"])
def test_a_checkpoint_from_before_the_first_step(tmp_path: Path, optimizer: type[torch.optim.Optimizer]) -> None:
    source, target = build(optimizer), build(optimizer, seed=1)
    steps(target, 5)
    recfx.save_checkpoint(source, tmp_path)
    recfx.load_checkpoint(target, tmp_path)
    state = {name: of_parameter for name, (_, of_parameter) in states(target).items()}
    assert [dict(state[name]) for name in ("after.weight", "after.bias", "after.bias#1")] == [{}, {}, {}]
    if optimizer is torch.optim.NAdam:
        assert dict(state[TABLE]) == {}
    else:
        assert not any(bool(value.any()) for value in state[TABLE].values())
    bigger = build(optimizer, rows=60)
    recfx.load_checkpoint(bigger, tmp_path)  # without a state there are no rows to move
    for model in (source, target):
        steps(model, 2)
    assert_same(all_state(target), all_state(source))


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, RowWiseAdagrad])
def test_grown_rows_start_where_a_new_row_does(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    source, target = (build(kind, rows, initial_accumulator_value=0.25) for rows in (40, 60))
    steps(source, 0)
    steps(target, 5, 6)
    recfx.save_checkpoint(source, tmp_path)
    recfx.load_checkpoint(target, tmp_path)
    old, new = (model.first.fused_optimizers()["a"].state["sum"] for model in (source, target))
    ids, rows = source.first.index("a").items()
    kept = target.first.index("a").find(ids)
    assert torch.equal(new[kept], old[rows])
    fresh = torch.ones(60, dtype=torch.bool)
    fresh[kept] = False
    assert bool((new[fresh] == 0.25).all())


@pytest.mark.parametrize("decays", ["saved", "here"])
def test_weight_decay_on_one_side_only(tmp_path: Path, decays: str) -> None:
    source, target = (build(weight_decay=0.1 * (decays == side)) for side in ("saved", "here"))
    recfx.save_checkpoint(source, tmp_path)
    error = refused(target, tmp_path)
    assert "only one of the saved optimizer and this one has a weight_decay" in error.message
    recfx.load_checkpoint(build(weight_decay=0.2 * (decays == "saved")), tmp_path)


@pytest.mark.parametrize("rows", [40, 60])
def test_blocks_of_columns_become_their_mean(tmp_path: Path, rows: int) -> None:
    """Saved as if the columns had been on several ranks."""
    source = build(RowWiseAdagrad)
    steps(source, 0)
    recfx.save_checkpoint(source, tmp_path)
    state = torch.rand(80, 1)
    blocks = [(0, 1), (1, 4)]
    change_settings(tmp_path, lambda settings: settings["in_backward"][TABLE].update(blocks=blocks))
    change_tensors(tmp_path, lambda tensors: tensors.update({f"optimizer.{TABLE}.sum": state}))
    target = build(RowWiseAdagrad, rows)
    recfx.load_checkpoint(target, tmp_path)
    sums = target.first.fused_optimizers()["a"].state["sum"]
    ids, old = source.first.index("a").items()
    new = target.first.index("a").find(ids)
    expected = (state[:40] * 0.25 + state[40:] * 0.75)[old]  # weighted by columns
    assert ids.numel() > 5
    torch.testing.assert_close(sums[new].view(-1), expected.view(-1))
