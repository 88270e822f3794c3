"""Models to be planned for: several collections, weighted ones, shared features, subclasses."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig


def collection(
    prefix: str, *, rows: int = 1000, dim: int = 64, weighted: bool = False, device: str = "meta"
) -> EmbeddingBagCollection:
    """Three tables that share a feature."""
    return EmbeddingBagCollection(tables(prefix, rows, dim), is_weighted=weighted, device=torch.device(device))


def tables(prefix: str, rows: int = 1000, dim: int = 64) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"{prefix}{number}",
            num_embeddings=rows * (number + 1),
            embedding_dim=dim,
            feature_names=[f"f{number}", "shared"],
        )
        for number in range(3)
    ]


class Subclass(EmbeddingBagCollection):
    def __init__(self, prefix: str, device: str = "meta") -> None:
        super().__init__(tables(prefix), device=torch.device(device))


class Model(nn.Module):
    """A plain, a weighted and a subclassed collection; nine tables."""

    def __init__(self, device: str = "meta", rows: int = 1000) -> None:
        super().__init__()
        self.plain = collection("p", rows=rows, device=device)
        self.part = nn.ModuleDict({"weighted": collection("w", weighted=True, device=device)})
        self.own = Subclass("s", device)
        self.head = nn.Linear(8, 1, device=device)


PATHS = {"plain": "p", "part.weighted": "w", "own": "s"}
