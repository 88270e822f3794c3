"""MovieLens-100K: a model trained plain and converted learns the same, also from raw 64-bit ids."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType

import recfx
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from tests.builders.collections import table

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


def read_ratings(path: Path) -> Ratings:
    lines = path.read_text().splitlines()[1:]
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
            [
                table("viewers", ["user"], rows=USER_ROWS, dim=DIM),
                table("movies", ["item"], rows=ITEM_ROWS, dim=DIM),
                table("liked_movies", ["history"], rows=ITEM_ROWS, dim=DIM, pooling=PoolingType.MEAN),
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


def auc(scores: torch.Tensor, liked: torch.Tensor) -> float:
    order = scores.argsort()
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = liked > 0
    count = int(positive.sum())
    above = ranks[positive].sum() - count * (count + 1) / 2
    return float(above / (count * (len(liked) - count)))


def ids_of(features: KeyedJaggedTensor, raw: bool) -> KeyedJaggedTensor:
    """The batch, perhaps with ids spread over all 64 bits: multiplication by an odd number makes no two ids one."""
    values = features.values() * -7046029254386353131 + 2**61 if raw else features.values()
    return KeyedJaggedTensor(features.keys(), values, lengths=features.lengths())


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
