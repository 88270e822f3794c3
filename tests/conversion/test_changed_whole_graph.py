"""A whole graph whose model is changed afterwards answers as the changed model does, or refuses to run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torchrec import KeyedJaggedTensor

import recfx
from recfx.collections.copy_modules import copy_modules
from recfx.models.discover import set_mode
from tests.builders.batches import one_bag, two_bags
from tests.builders.collections import one_table, tables_named
from tests.builders.optimizers import attach
from tests.support.refusals import refused

BATCH = two_bags(1, 2, 7)
Change = Callable[[Any], object]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = one_table()
        self.scale = 2.0
        self.epoch = 0

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(features).values() * self.scale


class Model(nn.Module):
    limit = 100.0

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.head = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))
        self.mask = torch.ones(4)
        self.temperature = 2.0
        self.settings = {"shift": 1.0}
        self.register_buffer("calls", torch.zeros(()))

    def set_temperature(self, value: float) -> None:
        self.temperature = value

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        self.calls += 1
        pooled = self.head(self.part(features)) * self.weight * self.mask + self.calls
        return (pooled / self.temperature + self.settings["shift"]).clamp(max=self.limit)


def graph_of(model: nn.Module) -> Any:
    return recfx.convert(model, (BATCH,), whole_graph=True)


FOLLOWED: dict[str, Change] = {
    "module": lambda model: setattr(model, "head", nn.Linear(4, 1)),
    "parameter": lambda model: setattr(model, "weight", nn.Parameter(torch.full((4,), 3.0))),
    "buffer": lambda model: setattr(model, "calls", torch.ones(())),
    "plain_tensor": lambda model: setattr(model, "mask", torch.tensor([0.0, 1.0, 0.0, 1.0])),
    "parametrization": lambda model: parametrize.register_parametrization(model, "weight", nn.Softplus()),
    "attribute_that_forward_does_not_read": lambda model: setattr(model.part, "epoch", 7),
}
REFUSED: dict[str, tuple[str, Change]] = {
    "attribute": ("", lambda model: setattr(model, "temperature", 0.1)),
    "method": ("", lambda model: model.set_temperature(0.1)),
    "of_the_class": ("", lambda model: setattr(model, "limit", 0.5)),
    "dict": ("", lambda model: model.settings.update(shift=2.0)),
    "nested": ("part", lambda model: setattr(model.part, "scale", 3.0)),
    "hook": ("part", lambda model: model.part.register_forward_hook(lambda *_: torch.zeros(2, 4))),
    "hook_of_a_collection": ("part.ebc", lambda model: model.part.ebc.register_forward_pre_hook(lambda *_: None)),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_takes_the_place_of_a_part_is_used(name: str) -> None:
    model = Model()
    original, graph = copy.deepcopy(model), graph_of(model)
    for changed in (original, graph):
        torch.manual_seed(0)
        FOLLOWED[name](changed)
    for training in (True, False, True):
        assert torch.equal(graph.train(training)(BATCH), original.train(training)(BATCH))


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_with_another_constant_does_not_run(name: str) -> None:
    path, change = REFUSED[name]
    graph = graph_of(Model())
    graph(BATCH)
    change(graph)
    with refused("outdated_graph", path):
        graph(BATCH)
    if not name.startswith("hook"):
        assert torch.equal(graph_of(copy.deepcopy(graph.python_model))(BATCH), graph.python_model(BATCH))


class Switched(Model):
    """Its class makes something of the mode."""

    merges = False

    def train(self, mode: bool = True) -> Switched:
        if self.merges:
            self.weight.data.mul_(2.0)
        self.temperature = 2.0 if mode else 4.0
        return super().train(mode)


def test_the_mode_is_set_as_the_class_of_the_model_does() -> None:
    model = Switched()
    original, graph = copy.deepcopy(model), graph_of(model)
    for training in (True, False, True):
        assert torch.equal(graph.train(training)(BATCH), original.train(training)(BATCH))


def test_a_copy_in_another_mode_leaves_the_weights_that_it_shares() -> None:
    model = Switched()
    model.merges = True
    copied, _ = copy_modules(model)
    set_mode(copied, False)
    assert copied.part.training is False
    assert torch.equal(model.weight, torch.ones(4))


def test_an_export_has_what_took_the_place_of_a_part(tmp_path: Path) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc, self.head = one_table(), nn.Linear(4, 4)

        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return self.head(self.ebc(features).values())

    graph = graph_of(Heads()).eval()
    graph.head = nn.Linear(4, 1)
    recfx.export(graph, tmp_path / "model.pt", (BATCH,))
    answer = recfx.load(tmp_path / "model.pt")(BATCH)
    assert answer.shape == (2, 1)
    torch.testing.assert_close(answer, graph(BATCH).detach())


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = one_table()
        self.calls = 0

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        self.calls += 1
        return self.ebc(features).values() * self.calls


def test_a_number_that_the_forward_changes_is_no_constant() -> None:
    with refused("untraceable_root", match="attribute calls"):
        graph_of(Counts())
    model = nn.Sequential(Counts())
    original, graph = copy.deepcopy(model), graph_of(model)
    assert [(note.path, note.code) for note in recfx.explain(graph).reasons] == [("0", "lost_by_tracing")]
    for _ in range(3):
        assert torch.equal(graph(BATCH), original(BATCH))


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_optimizer_in_backward_that_is_attached_after_the_conversion_is_fused(when: str) -> None:
    """Adam moves rows that no batch reads only if it is not fused."""
    model: Any = nn.Sequential(tables_named("t", rows=4))
    if when == "before":
        attach(model, torch.optim.Adam)
    converted: Any = recfx.convert(model, (one_bag(0, feature="t"),), whole_graph=True)
    if when == "after":
        attach(converted, torch.optim.Adam)
    for row in (1, 2):
        before = converted.get_parameter("0.embedding_bags.t.weight").detach().clone()
        converted(one_bag(row, feature="t")).values().sum().backward()
    moved = (converted.get_parameter("0.embedding_bags.t.weight") - before).abs().sum(dim=1)
    assert torch.nonzero(moved).flatten().tolist() == [2]
