"""A model and its batches, as a team has them; the scripts `torchrun_before.py` and `torchrun_after.py` train it."""

from collections.abc import Iterator

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

IDS = 300
"""The number of users, and that of movies."""


class TwoTower(torch.nn.Module):
    """How well a user and a movie match."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"{feature}s",
                num_embeddings=IDS,
                embedding_dim=16,
                feature_names=[feature],
                weight_init_min=0.1,  # all weights are equal at first: TorchRec draws them anew when it shards,
                weight_init_max=0.1,  # and two runs could not be compared
            )
            for feature in ("user", "movie")
        ]
        self.ebc = EmbeddingBagCollection(tables)
        self.over = torch.nn.Linear(16, 16)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        return (self.over(pooled["user"]) * pooled["movie"]).sum(dim=1)


def batches(rank: int, steps: int = 100, size: int = 64) -> Iterator[tuple[KeyedJaggedTensor, torch.Tensor]]:
    """A rank's batches and their labels ``[size]``: a user likes a movie if both numbers are even, or both are odd."""
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        users, movies = torch.randint(IDS, (2, size), generator=draw)
        lengths = torch.ones(2 * size, dtype=torch.int64)
        yield KeyedJaggedTensor(["user", "movie"], torch.cat([users, movies]), lengths=lengths), (users + movies) % 2.0
