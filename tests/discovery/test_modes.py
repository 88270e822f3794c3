"""What a model calls in one mode only, and how often: found by tracing it in both modes, which the user never sees."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, KeyedTensor

import recfx
from tests.builders.batches import two_bags
from tests.builders.collections import table


class Modes(nn.Module):
    """Calls its collection so often in each mode."""

    def __init__(self, in_training: int, in_eval: int) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([table("t", ["f"], dim=4)])
        self.times = {True: in_training, False: in_eval}

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        pooled = [self.ebc(batch).values() for _ in range(self.times[self.training])]
        return sum(pooled[1:], pooled[0]) if pooled else batch.values().float()


@pytest.mark.parametrize("modes", [(1, 0), (0, 1), (2, 1), (1, 3), (2, 2)])
def test_calls_of_the_mode_that_makes_most(modes: tuple[int, int]) -> None:
    sample = (two_bags(1, 2, 3),)
    for was_training in (True, False):
        model = Modes(*modes).train(was_training)
        report = recfx.explain(model, sample)
        assert report.collections[0].found == "traced"
        converted = recfx.convert(model, sample=sample)
        assert converted.ebc.calls == max(modes)
        assert model.training is was_training


def test_a_collection_that_nothing_calls() -> None:
    assert recfx.explain(Modes(0, 0), (two_bags(1, 2, 3),)).collections[0].found == "never called"


class Hooked(nn.Module):
    """Calls its collection where a trace does not look: in a hook, or in a ``forward`` that an instance has."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([table("t", ["f"], dim=4)])
        self.cut = nn.Identity()
        if by == "forward":
            self.cut.forward = self.look_up
        else:
            self.cut.register_forward_hook(self.hook)

    def hook(self, _module: nn.Module, _inputs: object, output: KeyedJaggedTensor) -> KeyedTensor:
        return self.look_up(output)

    def look_up(self, batch: KeyedJaggedTensor) -> KeyedTensor:
        return self.ebc(batch)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.cut(batch).values()


@pytest.mark.parametrize("by", ["hook", "forward"])
def test_calls_that_verification_sees_are_calls(by: str) -> None:
    sample = (two_bags(1, 2, 3),)
    model = Hooked(by)
    converted = recfx.convert(model, sample)
    assert recfx.verify(model, converted, sample).called == {"ebc"}
    for report in (recfx.explain(model, sample), recfx.explain(converted), recfx.explain(converted, sample)):
        assert report.collections[0].found == "traced"
        assert "never_called" not in {reason.code for reason in report.reasons}
    assert recfx.explain(model, sample, verify=False).collections[0].found == "never called"


@dataclass
class Inputs:
    """A user's own class of batches."""

    features: KeyedJaggedTensor
    dense: torch.Tensor
    notes: list[str]


class Careless(nn.Module):
    """Changes what it is given, and what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([table("t", ["f"], dim=4)])
        self.plain = torch.zeros(1)
        self.register_buffer("buffer", torch.zeros(1))

    def forward(self, inputs: Inputs, options: dict[str, torch.Tensor]) -> torch.Tensor:
        self.plain.add_(1)
        self.buffer.add_(1)
        inputs.dense.mul_(2)
        inputs.notes.append("seen")
        options["scale"].mul_(3)
        return self.ebc(inputs.features).values() * inputs.dense * options["scale"]


@pytest.mark.parametrize("step", ["explain", "convert", "trace"])
def test_nothing_that_the_caller_holds_changes(step: str) -> None:
    model = Careless()
    inputs = Inputs(two_bags(1, 2, 3), torch.ones(2, 1), ["kept"])
    options = {"scale": torch.ones(1)}
    before = inputs.features, inputs.dense, inputs.notes
    sample = (inputs, options)
    if step == "explain":
        recfx.explain(model, sample)
    elif step == "convert":
        recfx.convert(model, sample=sample)
    else:
        recfx.trace(model, sample)
    assert all(one is other for one, other in zip((inputs.features, inputs.dense, inputs.notes), before, strict=True))
    assert inputs.dense.tolist() == [[1.0], [1.0]]
    assert inputs.notes == ["kept"]
    assert options["scale"].item() == 1
    assert inputs.features.values().tolist() == [1, 2, 3]
    assert model.plain.item() == model.buffer.item() == 0
    assert model.training
