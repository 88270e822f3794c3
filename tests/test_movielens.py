"""MovieLens-100K: a model trained plain and converted learns the same, also from raw 64-bit ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from recfx.modules.collection import HashEmbeddingBagCollection

BATCH_SIZE = 128  # one epoch of 700 steps; the losses of the first 100 are compared one by one
DIM = 16
USER_ROWS, ITEM_ROWS = 944, 1683  # ids start at 1
KEYS = ["user", "item", "history"]
HISTORY = 8  # the items that the user rated last


@dataclass(frozen=True)
class Ratings:
    """Ratings in order of time; ``history`` holds ids, ``history_lengths`` how many each rating has."""

    user: torch.Tensor
    item: torch.Tensor
    liked: torch.Tensor
    history: list[list[int]]

    def batches(self, begin: int, end: int) -> Iterator[tuple[KeyedJaggedTensor, torch.Tensor]]:
        """Ratings ``[begin, end)`` of one shuffled order, always the same."""
        order = torch.randperm(len(self.user), generator=torch.Generator().manual_seed(5))
        for chosen in order[begin:end].split(BATCH_SIZE):
            histories = [self.history[i] for i in chosen.tolist()]
            lengths = torch.tensor([1] * (2 * len(chosen)) + [len(items) for items in histories])
            flat = torch.tensor([item for items in histories for item in items], dtype=torch.int64)
            values = torch.cat([self.user[chosen], self.item[chosen], flat])
            yield KeyedJaggedTensor(KEYS, values, lengths=lengths), self.liked[chosen]


@pytest.fixture(scope="module")
def ratings(data_directory: Path) -> Ratings:
    lines = (data_directory / "ml-100k" / "ml-100k.inter").read_text().splitlines()[1:]
    rows = sorted((line.split("\t") for line in lines), key=lambda row: (float(row[3]), int(row[0]), int(row[1])))
    last: dict[int, list[int]] = {}
    history = []
    for user, item, rating, _ in rows:
        seen = last.setdefault(int(user), [])
        history.append(seen[-HISTORY:])
        if float(rating) >= 4:
            seen.append(int(item))
    assert len(rows) == 100_000
    return Ratings(
        user=torch.tensor([int(row[0]) for row in rows]),
        item=torch.tensor([int(row[1]) for row in rows]),
        liked=torch.tensor([float(float(row[2]) >= 4) for row in rows]),
        history=history,
    )


class TwoTowers(nn.Module):
    """User with the mean of what they liked last, against the item."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="viewers", num_embeddings=USER_ROWS, embedding_dim=DIM, feature_names=["user"]),
                EmbeddingBagConfig(name="movies", num_embeddings=ITEM_ROWS, embedding_dim=DIM, feature_names=["item"]),
                EmbeddingBagConfig(
                    name="liked_movies",
                    num_embeddings=ITEM_ROWS,
                    embedding_dim=DIM,
                    feature_names=["history"],
                    pooling=PoolingType.MEAN,
                ),
            ]
        )
        self.user_tower = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.item_tower = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.over = nn.Linear(3 * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        user = self.user_tower(torch.cat([pooled["user"], pooled["history"]], dim=1))
        item = self.item_tower(pooled["item"])
        return self.over(torch.cat([user, item, user * item], dim=1)).squeeze(1)


def to_raw(values: torch.Tensor) -> torch.Tensor:
    """Ids spread over all 64 bits, no two to one: multiplication by an odd number is injective modulo 2**64."""
    return values * -7046029254386353131 + 2**61


def auc(scores: torch.Tensor, liked: torch.Tensor) -> float:
    """Area under the ROC curve, by ranks."""
    order = scores.argsort()
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = liked > 0
    count = int(positive.sum())
    above = ranks[positive].sum() - count * (count + 1) / 2
    return float(above / (count * (len(liked) - count)))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, ratings: Ratings, *, raw: bool = False
) -> tuple[list[float], float]:
    """The loss of every step, and the AUC on the last tenth of the ratings."""
    losses = []
    model.train()
    for features, liked in ratings.batches(0, 90_000):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(_ids(features, raw)), liked)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    scores, labels = [], []
    with torch.no_grad():
        for features, liked in ratings.batches(90_000, 100_000):
            scores.append(model(_ids(features, raw)))
            labels.append(liked)
    return losses, auc(torch.cat(scores), torch.cat(labels))


def _ids(features: KeyedJaggedTensor, raw: bool) -> KeyedJaggedTensor:
    if not raw:
        return features
    return KeyedJaggedTensor(features.keys(), to_raw(features.values()), lengths=features.lengths())


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
