"""``model.fused_optimizer``: one optimizer for all sharded collections below, made anew for copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer

from recfx.optim.keyed_optimizer import ModelFusedOptimizer, attach_fused_optimizer, detach_fused_optimizer


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


def test_it_has_the_parameters_of_all_collections_under_their_paths() -> None:
    model = model_of(1.0, 2.0)
    attach_fused_optimizer(model)
    assert isinstance(model.fused_optimizer, ModelFusedOptimizer)
    assert list(model.fused_optimizer.params) == ["inner.0.weight", "inner.1.weight"]
    assert model.fused_optimizer.params["inner.1.weight"] is model.inner[1].weight
    assert model.fused_optimizer.state_dict()["state"].keys() == {"inner.0.weight", "inner.1.weight"}
    assert list(model.state_dict()) == ["inner.0.weight", "inner.1.weight"]


def test_it_is_made_anew_for_other_collections_and_detached() -> None:
    model = model_of(1.0)
    attach_fused_optimizer(model)
    first = model.fused_optimizer
    model.inner.append(Part(2.0))
    attach_fused_optimizer(model)
    assert model.fused_optimizer is not first
    assert len(model.fused_optimizer.params) == 2
    for _ in range(2):
        detach_fused_optimizer(model)
        assert not hasattr(model, "fused_optimizer")


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
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_the_optimizers_of_its_own_collections(copied: Callable[[Any], Any]) -> None:
    model = model_of(1.0, 2.0)
    attach_fused_optimizer(model)
    other = copied(copied(model))
    assert other.fused_optimizer.params["inner.1.weight"] is other.inner[1].weight
    assert [group["lr"] for group in other.fused_optimizer.param_groups] == [1.0, 2.0]
    assert {id(each) for each in other.fused_optimizer.params.values()} == {id(each) for each in other.parameters()}
    assert not {id(each) for each in other.parameters()} & {id(each) for each in model.parameters()}
