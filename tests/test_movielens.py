"""MovieLens-100K: a model trained plain and converted learns the same, also from raw 64-bit ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from tests.builders.movielens import ITEM_ROWS, USER_ROWS, Ratings, TwoTowers, auc, ids_of, read_ratings


@pytest.fixture(scope="module")
def ratings(data_directory: Path) -> Ratings:
    return read_ratings(data_directory / "ml-100k" / "ml-100k.inter")


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, ratings: Ratings, *, raw: bool = False
) -> tuple[list[float], float]:
    """The loss of every step, and the AUC on the last tenth of the ratings."""
    losses = []
    model.train()
    for features, liked in ratings.batches(0, 90_000):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids_of(features, raw)), liked)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    scores, labels = [], []
    with torch.no_grad():
        for features, liked in ratings.batches(90_000, 100_000):
            scores.append(model(ids_of(features, raw)))
            labels.append(liked)
    return losses, auc(torch.cat(scores), torch.cat(labels))


def new_model() -> TwoTowers:
    torch.manual_seed(11)
    return TwoTowers()


@dataclass(frozen=True)
class Recipe:
    """How to train, and what the plain model reaches."""

    optimizer: type[torch.optim.Optimizer]
    settings: dict[str, float]
    auc_at_least: float

    def prepare(self, model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
        """The optimizer of the model; the tables' runs in their backward where ``fused``."""
        parameters = dict(model.named_parameters())
        tables = [parameters.pop(name) for name in list(parameters) if name.startswith("ebc.")]
        if fused:
            _apply_optimizer_in_backward(self.optimizer, tables, dict(self.settings))
        else:
            parameters |= {str(position): weight for position, weight in enumerate(tables)}
        return self.optimizer(parameters.values(), **self.settings)


SGD = Recipe(torch.optim.SGD, {"lr": 1.0}, 0.65)
ADAGRAD = Recipe(torch.optim.Adagrad, {"lr": 0.05}, 0.76)


@pytest.fixture(scope="module")
def plain(ratings: Ratings) -> dict[str, tuple[list[float], float]]:
    """Losses and AUC of the plain model, by optimizer."""
    results = {}
    for recipe in (SGD, ADAGRAD):
        model = new_model()
        results[recipe.optimizer.__name__] = train(model, recipe.prepare(model), ratings)
    return results


@pytest.mark.parametrize("recipe", [SGD, ADAGRAD], ids=["sgd", "adagrad"])
@pytest.mark.parametrize("fused", [False, True], ids=["stepped", "fused"])
def test_converted_it_learns_the_same(
    plain: dict[str, tuple[list[float], float]], ratings: Ratings, recipe: Recipe, fused: bool
) -> None:
    plain_losses, plain_quality = plain[recipe.optimizer.__name__]
    assert plain_quality > recipe.auc_at_least  # or the comparison would show nothing
    model = new_model()
    optimizer = recipe.prepare(model, fused=fused)
    model = convert(model, (next(ratings.batches(0, 100))[0],))
    assert isinstance(model.ebc, HashEmbeddingBagCollection)
    losses, quality = train(model, optimizer, ratings)
    assert losses[:100] == pytest.approx(plain_losses[:100], rel=0, abs=1e-5)
    assert quality == pytest.approx(plain_quality, abs=0.002)


@pytest.mark.parametrize("fused", [False, True], ids=["stepped", "fused"])
def test_it_learns_as_well_from_raw_ids(
    plain: dict[str, tuple[list[float], float]], ratings: Ratings, fused: bool
) -> None:
    """Other initial rows, therefore not the same losses. With Adagrad: one epoch of SGD is far from converged."""
    plain_quality = plain["Adagrad"][1]
    model = new_model()
    optimizer = ADAGRAD.prepare(model, fused=fused)
    model = convert(model, hashing=HashConfig(dense_rows=0))
    _, quality = train(model, optimizer, ratings, raw=True)
    sizes = {name: len(index) for name, index in model.ebc.hash_indexes.items()}
    assert 900 < sizes["viewers"] < USER_ROWS
    assert 1500 < sizes["movies"] < ITEM_ROWS
    assert sizes["liked_movies"] <= sizes["movies"]
    assert quality == pytest.approx(plain_quality, abs=0.005)
