"""``collection.fused_optimizer`` as TorchRec's ``KeyedOptimizer``: what it saves is what it loads, or is refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import PartialRowWiseAdam

import recfx
from recfx.optim.keyed_optimizer import attach_fused_optimizer, detach_fused_optimizer
from tests.builders.batches import bags
from tests.builders.collections import tables_named
from tests.builders.optimizers import attach
from tests.support.refusals import refused

NAME = "embedding_bags.a.weight"


def collection(kind: Any = "adam", rows: int = 6, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = tables_named("a", "b", rows=rows)
    attach(model, kind, **settings)
    return recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0, buckets=1))


def train(model: Any, steps: int = 2) -> None:
    for _ in range(steps):
        (model(bags({"a": [(0, 1, 3)], "b": [(5, 1)]})).values() - 2).square().sum().backward()


def state(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    return copy.deepcopy(model.fused_optimizer.state_dict()["state"])


def test_state_and_settings_round_trip_in_a_combined_optimizer() -> None:
    """Into the tensors that the kernels use, and into the settings that they read."""
    trained, loaded = collection(lr=0.25), collection(lr=0.1)
    dense = nn.Linear(2, 2)
    train(trained)
    both = []
    for model in (trained, loaded):
        ordinary = KeyedOptimizerWrapper(dict(dense.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.5))
        combined = CombinedOptimizer([("sparse", model.fused_optimizer), ("dense", ordinary)])
        combined.save_param_groups(True)
        both.append(combined)
    loaded.load_state_dict(trained.state_dict())
    both[1].load_state_dict(copy.deepcopy(both[0].state_dict()))
    assert {f"sparse.{name}" for name in state(trained)} <= both[1].params.keys()
    torch.testing.assert_close(state(loaded), state(trained), rtol=0, atol=0)
    assert [fused.group["lr"] for fused in loaded.fused_optimizers().values()] == [0.25, 0.25]
    for model in (trained, loaded):
        train(model)
    torch.testing.assert_close(state(loaded), state(trained), rtol=0, atol=0)
    assert torch.equal(loaded.weight("b"), trained.weight("b"))


def test_neither_step_nor_zero_grad_changes_anything() -> None:
    model = collection()
    train(model)
    before, weight = state(model), model.weight("a").detach().clone()
    weight_grad = model.weight("a").grad = torch.ones_like(weight)
    for keyed in (model.fused_optimizer, CombinedOptimizer([model.fused_optimizer])):
        keyed.step()
        keyed.zero_grad()
        keyed.zero_grad(set_to_none=True)
    assert model.weight("a").grad is weight_grad
    assert torch.equal(model.weight("a"), weight)
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["adagrad", "rowwise_adagrad", "adam"])
def test_state_of_fewer_rows_moves_with_the_weights(kind: str) -> None:
    """The rows that are kept have the saved state, new rows the state before a row's first step."""
    start = {} if kind == "adam" else {"initial_accumulator_value": 0.5}
    small, big = collection(kind, **start), collection(kind, rows=9, **start)
    train(small)
    saved = state(small)
    big.load_state_dict(small.state_dict())
    big.fused_optimizer.load_state_dict({"state": copy.deepcopy(saved)})
    moved = state(big)
    for name in saved:
        for key, value in saved[name].items():
            if key.endswith("step"):
                assert torch.equal(moved[name][key], value)
                continue
            assert moved[name][key].shape == (9, *value.shape[1:])
            kept = 3 if name == NAME else 2  # ids have the first rows of the only bucket
            assert torch.equal(moved[name][key][:kept], value[:kept])
            assert bool((moved[name][key][kept:] == (0.5 if start else 0.0)).all())
            assert bool((value[:kept] != (0.5 if start else 0.0)).any())


@pytest.mark.parametrize("wrong", [torch.ones(5, 4), torch.ones(6, 3), torch.ones(6), torch.tensor(1.0)])
def test_state_that_is_not_that_of_the_loaded_weights_is_refused(wrong: torch.Tensor) -> None:
    small, big = collection(), collection(rows=9)
    train(small)
    big.load_state_dict(small.state_dict())
    before, saved = state(big), state(small)
    saved[NAME]["a.exp_avg_sq"] = wrong
    with refused("rows_mismatch", NAME, error=recfx.CheckpointError):
        big.fused_optimizer.load_state_dict({"state": saved})
    torch.testing.assert_close(state(big), before, rtol=0, atol=0)


class Part(nn.Module, FusedOptimizerModule):
    """Stands for a sharded collection: a table and the optimizer of its rows."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        group = {"params": [self.weight], "lr": float(self.weight.detach()[0])}
        return KeyedOptimizer({"weight": self.weight}, {self.weight: {"sum": torch.ones(2)}}, [group])


def model_of(*values: float) -> Any:
    model = nn.Module()
    model.inner = nn.ModuleList(map(Part, values))
    return model


def test_a_users_own_attribute_stays() -> None:
    model = model_of(1.0)
    model.fused_optimizer = "mine"
    attach_fused_optimizer(model)
    detach_fused_optimizer(model)
    assert model.fused_optimizer == "mine"
    part = Part(3.0)  # has one as a property
    attach_fused_optimizer(part)
    detach_fused_optimizer(part)
    assert type(part.fused_optimizer) is KeyedOptimizer


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_the_optimizers_of_its_own_collections(copied: Callable[[Any], Any]) -> None:
    model = model_of(1.0, 2.0)
    attach_fused_optimizer(model)
    again = copied(copied(model))
    assert again.fused_optimizer.params["inner.1.weight"] is again.inner[1].weight
    assert [group["lr"] for group in again.fused_optimizer.param_groups] == [1.0, 2.0]
    weights = {id(weight) for weight in again.parameters()}
    assert {id(weight) for weight in again.fused_optimizer.params.values()} == weights
    assert not weights & {id(weight) for weight in model.parameters()}


@pytest.mark.parametrize("kind", ["adam", PartialRowWiseAdam])
def test_one_that_was_taken_before_training_has_the_steps_since(kind: Any) -> None:
    """As scripts do that put it into a ``CombinedOptimizer`` before they train."""
    early, stepped = collection(kind), collection(kind)
    optimizers = early.fused_optimizer, stepped.fused_optimizer
    train(early, 3)
    train(stepped, 1)
    saved = copy.deepcopy(optimizers[0].state_dict())
    torch.testing.assert_close(saved["state"], state(early), rtol=0, atol=0)
    assert {float(values["a.step"]) for name, values in saved["state"].items() if name == NAME} == {3.0}
    stepped.load_state_dict(early.state_dict())
    optimizers[1].load_state_dict(saved)
    for model in (early, stepped):
        train(model, 1)
    assert torch.equal(early.weight("a"), stepped.weight("a"))
