"""Models to be planned for: several collections, weighted and sequence ones, shared features, subclasses."""

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection


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


def sequences(prefix: str, *, rows: int = 1000, dim: int = 64, device: str = "meta") -> EmbeddingCollection:
    """A sequence collection with the tables of ``collection``: rows are not pooled."""
    configs = [
        EmbeddingConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=dim,
            feature_names=list(table.feature_names),
        )
        for table in tables(prefix, rows, dim)
    ]
    return EmbeddingCollection(configs, device=torch.device(device))


def fused_collection(*names: str) -> FusedEmbeddingBagCollection:
    """A collection that TorchRec shards, and that is not converted, with a table for each name."""
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=1000, embedding_dim=64, feature_names=[name]) for name in names
    ]
    return FusedEmbeddingBagCollection(configs, torch.optim.SGD, {"lr": 0.1}, device=torch.device("meta"))


class Subclass(EmbeddingBagCollection):
    def __init__(self, prefix: str, device: str = "meta") -> None:
        super().__init__(tables(prefix), device=torch.device(device))


class Model(nn.Module):
    """A plain, a weighted, a subclassed and a sequence collection; twelve tables."""

    def __init__(self, device: str = "meta", rows: int = 1000) -> None:
        super().__init__()
        self.plain = collection("p", rows=rows, device=device)
        self.part = nn.ModuleDict({"weighted": collection("w", weighted=True, device=device)})
        self.own = Subclass("s", device)
        self.sequence = sequences("q", rows=rows, device=device)
        self.head = nn.Linear(8, 1, device=device)


PATHS = {"plain": "p", "part.weighted": "w", "own": "s", "sequence": "q"}
