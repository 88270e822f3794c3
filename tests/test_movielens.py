"""MovieLens-100K: a model trained plain and converted learns the same, also from raw 64-bit ids."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import recfx
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
    return losses, quality_of(model.eval(), ratings, raw=raw)


def quality_of(model: nn.Module, ratings: Ratings, *, raw: bool) -> float:
    """The AUC on the last tenth of the ratings."""
    scores, labels = [], []
    with torch.no_grad():
        for features, liked in ratings.batches(90_000, 100_000):
            scores.append(model(ids_of(features, raw)))
            labels.append(liked)
    return auc(torch.cat(scores), torch.cat(labels))


def new_model() -> TwoTowers:
    torch.manual_seed(11)
    return TwoTowers()


def prepare(model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    """Adagrad; that of the tables runs in their backward where ``fused``."""
    parameters = dict(model.named_parameters())
    if fused:
        tables = [parameters.pop(name) for name in list(parameters) if name.startswith("ebc.")]
        _apply_optimizer_in_backward(torch.optim.Adagrad, tables, {"lr": 0.05})
    return torch.optim.Adagrad(parameters.values(), lr=0.05)


@pytest.fixture(scope="module")
def plain(ratings: Ratings) -> tuple[list[float], float]:
    """Losses and AUC of the plain model."""
    model = new_model()
    losses, quality = train(model, prepare(model, fused=False), ratings)
    assert quality > 0.76  # or a comparison would show nothing
    return losses, quality


def test_converted_it_learns_the_same(plain: tuple[list[float], float], ratings: Ratings) -> None:
    model = new_model()
    optimizer = prepare(model, fused=True)
    model = convert(model, (next(ratings.batches(0, 100))[0],))
    assert isinstance(model.ebc, HashEmbeddingBagCollection)
    losses, quality = train(model, optimizer, ratings)
    assert losses[:100] == pytest.approx(plain[0][:100], rel=0, abs=1e-5)
    assert quality == pytest.approx(plain[1], abs=0.002)


def test_it_learns_as_well_from_raw_ids(plain: tuple[list[float], float], ratings: Ratings, tmp_path: Path) -> None:
    """Other initial rows, therefore not the same losses. Its files rank as well, also with quantized rows."""
    model = new_model()
    optimizer = prepare(model, fused=True)
    model = convert(model, hashing=HashConfig(dense_rows=0))
    _, quality = train(model, optimizer, ratings, raw=True)
    sizes = {name: len(index) for name, index in model.ebc.hash_indexes.items()}
    assert 900 < sizes["viewers"] < USER_ROWS
    assert 1500 < sizes["movies"] < ITEM_ROWS
    assert sizes["liked_movies"] <= sizes["movies"]
    assert quality == pytest.approx(plain[1], abs=0.005)
    sample = ids_of(next(ratings.batches(0, 100))[0], raw=True)
    for quantize, most in ((None, 1e-6), ("fp16", 1e-4), ("int8", 1e-3), ("int4", 5e-3)):
        report = recfx.export(model, tmp_path / "model.pt", (sample,), quantize=quantize)
        assert (report.output_error > 1e-6) == (quantize is not None)
        of_file = quality_of(recfx.load(tmp_path / "model.pt"), ratings, raw=True)
        assert of_file == pytest.approx(quality, rel=0, abs=most)
