"""The model that a conversion is compared with: its tables, and the optimizers on them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.optim import optimizers as placeholders

import recfx
from recfx.models.reference_model import attach_optimizers
from recfx.models.verify_report import SKIPPED
from recfx.optim.attached import attached_optimizers
from tests.builders.batches import one_bag, two_bags
from tests.builders.collections import one_table, table
from tests.builders.optimizers import attach


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(1, 1)
        self.ebc = one_table()
        self.after = nn.Linear(4, 2)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.after(self.ebc(features).values())


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


RAW = 10**12


class Sub(EmbeddingBagCollection):
    def width(self) -> int:
        return sum(config.embedding_dim for config in self.embedding_bag_configs())


@pytest.mark.parametrize("on_full", ["error", "share", "evict"])
@pytest.mark.parametrize("unseen", ["zeros", "share"])
@pytest.mark.parametrize("admit_after", [1, 2, 3])
def test_a_step_of_ids_that_are_admitted_and_of_others(on_full: str, unseen: str, admit_after: int) -> None:
    """Ids that are seen for the first time, and for the second; with ``share``, more are admitted than have room."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = one_table(rows=6)

        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return self.ebc(features).values()

    policy: Any = {"on_full": on_full, "unseen": unseen, "admit_after": admit_after}
    model = Model()
    converted = recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0, buckets=1, **policy))
    several = 9 if on_full == "share" else 4  # as many may wait as there are rows
    sample = one_bag(*range(several), *range(several), *range(several), RAW, 2 * RAW, 2 * RAW)
    weight = converted.ebc.weight("t").detach().clone()
    report = recfx.verify(model, converted, (sample,))
    assert report.ok, str(report)
    assert not report.of(SKIPPED)
    assert torch.equal(converted.ebc.weight("t"), weight)


ASKED: dict[str, Callable[[Any, KeyedJaggedTensor], torch.Tensor]] = {
    "at_the_device": lambda model, features: model.ebc(features.to(model.ebc.device)).values(),
    "new_on_the_device": lambda model, features: model.ebc(features).values() + torch.ones(4, device=model.ebc.device),
    "configs": lambda model, features: (
        model.ebc(features).values() * sum(config.num_embeddings for config in model.ebc.embedding_bag_configs())
    ),
    "table": lambda model, features: (
        model.ebc(features).values() * model.ebc.embedding_bags["t"].weight.shape[0]
        + model.ebc.embedding_bags["t"].weight.square().mean()
    ),
    "method": lambda model, features: model.ebc(features).values() * model.ebc.width(),
    "attribute": lambda model, features: model.ebc.scale * model.ebc.after(model.ebc(features).values()),
    "tied": lambda model, features: model.ebc(features).values() @ model.tied.T,
}
"""What a forward may ask its collection for."""


@pytest.mark.parametrize("rows", [None, 30])
@pytest.mark.parametrize("admits", [{}, {"admit_after": 2, "unseen": "share"}], ids=str)
@pytest.mark.parametrize("asked", ASKED)
def test_a_model_that_asks_its_hashed_collection(asked: str, admits: dict[str, Any], rows: int | None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = Sub([table("t", ["f"], dim=4, rows=12)])
            self.ebc.scale = 3.0
            self.ebc.after = nn.Linear(4, 4)
            self.tied = self.ebc.embedding_bags["t"].weight

        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return ASKED[asked](self, features)

    sample = one_bag(RAW, 2, RAW, -1)
    converted = recfx.convert(Model(), (sample,), hashing=recfx.HashConfig(dense_rows=0, rows=rows, **admits))
    assert isinstance(converted.ebc, recfx.HashEmbeddingBagCollection)
    reasons = [reason.code for reason in recfx.explain(converted).reasons]
    assert "verification_skipped" not in reasons


def test_hooks_of_a_hashed_collection_run_on_both_sides() -> None:
    model = nn.Sequential(one_table())
    model[0].register_forward_pre_hook(lambda _, inputs: (inputs[0].to(torch.device("cpu")),))
    model[0].register_forward_hook(lambda _, inputs, pooled: pooled.values() * 2)
    assert recfx.convert(model, (one_bag(RAW, 1),), hashing=recfx.HashConfig(dense_rows=0))


def test_a_hashed_model_that_was_converted_in_place() -> None:
    """Its own indexes and rows are those of the reference."""
    model = nn.Sequential(Sub([table("t", ["f"], dim=4, rows=12)]))
    converted = recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0), inplace=True)
    assert converted is model
    converted(one_bag(RAW, 7))
    report = recfx.verify(model, converted, (one_bag(RAW, 2),))
    assert report.ok, str(report)
    assert not report.of(SKIPPED)
