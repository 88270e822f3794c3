"""The model that a conversion is compared with: its tables, and the optimizers on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.optim import optimizers as placeholders

import recfx
from recfx.optim.attached import attached_optimizers
from recfx.verification.reference_model import MappedCollection, attach_optimizers, copy_fused_state, reference_of
from tests.builders.batches import two_bags
from tests.builders.collections import one_table
from tests.builders.optimizers import attach


class Placeholder:
    """Holds arguments, like TorchRec's placeholders."""

    def __init__(self, params: Any, **settings: Any) -> None:
        self._params, self._kwargs = params, settings


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(1, 1)
        self.ebc = one_table()
        self.after = nn.Linear(4, 2)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.after(self.ebc(features).values())


def test_only_hashed_collections_are_replaced() -> None:
    model = Model()
    adopted = reference_of(model, recfx.convert(model))
    assert type(adopted.ebc) is EmbeddingBagCollection
    assert adopted.ebc.embedding_bags["t"].weight is not model.ebc.embedding_bags["t"].weight
    converted = recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0))
    mapped = reference_of(model, converted)
    assert isinstance(mapped.ebc, MappedCollection)
    assert mapped.ebc.hashed is converted.ebc
    assert mapped.after is not model.after
    assert torch.equal(mapped.after.weight, model.after.weight)
    assert type(model.ebc) is EmbeddingBagCollection
    assert isinstance(recfx.unconvert(converted), nn.Module)


def trained() -> Any:
    """The first layer has no optimizer in backward, the last one has two, of which one was changed since."""
    model = Model()
    attach(model.ebc, torch.optim.Adam, lr=0.5)
    attach(model.after, torch.optim.SGD, lr=0.25, momentum=0.5)
    attach([model.after.bias], torch.optim.Adagrad, lr=0.125)
    model(two_bags(1, 2, 7)).square().sum().backward()
    model.after.weight._in_backward_optimizers[0].param_groups[0]["lr"] = 0.75
    return model


def test_optimizers_are_copied_with_settings_and_state() -> None:
    source, duplicate = trained(), Model()
    attach_optimizers(source, duplicate, skip={"ebc.embedding_bags.t.weight"})
    assert [len(attached_optimizers(parameter)) for parameter in duplicate.parameters()] == [0, 0, 0, 1, 2]
    for name, parameter in duplicate.after.named_parameters():
        theirs = getattr(source.after, name)
        for ours, other in zip(attached_optimizers(parameter), attached_optimizers(theirs), strict=True):
            assert type(ours) is type(other)
            assert ours.param_groups[0]["params"] == [parameter]
            settings = [{k: v for k, v in each.param_groups[0].items() if k != "params"} for each in (ours, other)]
            assert settings[0] == settings[1]
            state, expected = ours.state[parameter], other.state[theirs]
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(state[key], value)
                assert state[key].data_ptr() != value.data_ptr()
    assert attached_optimizers(duplicate.after.weight)[0].param_groups[0]["lr"] == 0.75


@pytest.mark.parametrize("kind", [placeholders.LAMB, placeholders.LarsSGD, placeholders.Adam])
def test_a_dense_optimizer_stands_for_a_placeholder(kind: type[torch.optim.Optimizer]) -> None:
    """Whose own step() only raises: the model is compared with what the placeholder means."""
    model = Model()
    attach(model.ebc, kind, lr=0.25)
    call = recfx.Sample(two_bags(1, 2, 7))
    converted = recfx.convert(model, call)
    for hashing in (None, recfx.HashConfig(dense_rows=0)):
        assert recfx.verify(model, recfx.convert(model, hashing=hashing), call).ok
    converted(two_bags(1, 2, 7)).square().sum().backward()
    duplicate = Model()
    attach_optimizers(model, duplicate, skip=set())
    weight, fused = duplicate.ebc.embedding_bags["t"].weight, converted.ebc.fused_optimizers()["t"]
    (dense,) = attached_optimizers(weight)
    assert type(dense) is fused.rule.dense_class
    assert dense.param_groups[0]["lr"] == 0.25
    for name, value in fused.state.items():
        assert torch.equal(dense.state[weight][name], value)
        assert dense.state[weight][name] is not value


def test_a_placeholder_that_no_rule_stands_for_is_left_as_it_is() -> None:
    source, duplicate = Model(), Model()
    attach([source.after.weight], Placeholder)
    attach_optimizers(source, duplicate, skip=set())
    assert [type(each) for each in attached_optimizers(duplicate.after.weight)] == [Placeholder]


def test_optimizers_that_have_made_no_step() -> None:
    source, duplicate = Model(), Model()
    attach(source.after, torch.optim.Adam)
    attach_optimizers(source, duplicate, skip=set())
    assert len(attached_optimizers(duplicate.after.weight)[0].state) == 0


def test_the_state_of_a_mapped_table_is_a_copy() -> None:
    source = trained()
    converted = recfx.convert(source, hashing=recfx.HashConfig(dense_rows=0))
    converted(two_bags(1, 10**12, 7)).square().sum().backward()
    fused = converted.ebc.fused_optimizers()["t"].state
    reference = reference_of(source, converted)
    attach_optimizers(source, reference, skip=set())
    weight = reference.ebc.embedding_bags["t"].weight
    (optimizer,) = attached_optimizers(weight)
    copy_fused_state(converted, reference)
    state = optimizer.state[weight]
    assert state.keys() == fused.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert float(state["step"]) == float(fused["step"]) == 2
    assert state["step"] is not fused["step"]
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[name], fused[name])
        assert state[name].data_ptr() != fused[name].data_ptr()
        assert not torch.equal(fused[name], torch.zeros(10, 4))


def test_a_fused_optimizer_without_state_leaves_that_of_the_original() -> None:
    source = Model()
    attach(source.ebc, torch.optim.Adam)
    converted = recfx.convert(source, hashing=recfx.HashConfig(dense_rows=0))
    converted.ebc.fused_optimizers()["t"].state.clear()
    reference = reference_of(source, converted)
    attach_optimizers(source, reference, skip=set())
    weight = reference.ebc.embedding_bags["t"].weight
    copy_fused_state(converted, reference)
    assert weight not in attached_optimizers(weight)[0].state
