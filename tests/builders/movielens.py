"""MovieLens-100K: its ratings as batches, a model for them, and how good it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

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
    order = scores.argsort()
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = liked > 0
    count = int(positive.sum())
    above = ranks[positive].sum() - count * (count + 1) / 2
    return float(above / (count * (len(liked) - count)))


def ids_of(features: KeyedJaggedTensor, raw: bool) -> KeyedJaggedTensor:
    """The batch itself, or the same with raw ids."""
    if not raw:
        return features
    return KeyedJaggedTensor(features.keys(), to_raw(features.values()), lengths=features.lengths())
