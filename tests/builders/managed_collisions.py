"""Collections behind managed collisions, which have learned ids."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)

from tests.support.needs import needed

HashZchManagedCollisionModule = needed("torchrec.modules.hash_mc_modules.HashZchManagedCollisionModule", "TorchRec 1.4")
ROWS, DIM = 12, 4
FEATURES = {"a": ["f", "g"], "b": ["h"]}
CPU = torch.device("cpu")
LEARNED = [10**12, 7, -5, 2**62, 3]


def mch(rows: int = ROWS, policy: Any = None, interval: int = 1, **settings: Any) -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(rows, CPU, policy or LFU_EvictionPolicy(), interval, **settings)


def hash_zch(rows: int = ROWS, **settings: Any) -> HashZchManagedCollisionModule:
    """With identities as training on a GPU leaves them: in the slots where they are looked for."""
    return HashZchManagedCollisionModule(rows, CPU, total_num_buckets=1, max_probe=rows, **settings)


def managed(
    is_pooled: bool,
    make: Callable[[], ManagedCollisionModule] = mch,
    of_tables: Mapping[str, list[str]] = FEATURES,
    **settings: Any,
) -> Any:
    """A collection of tables ``a`` (features ``f`` and ``g``) and ``b`` (feature ``h``), unless others are given."""
    kind: Any = EmbeddingBagConfig if is_pooled else EmbeddingConfig
    configs = [
        kind(num_embeddings=ROWS, embedding_dim=DIM, name=table, feature_names=features)
        for table, features in of_tables.items()
    ]
    remapping = ManagedCollisionCollection({table: make() for table in of_tables}, configs)
    if is_pooled:
        return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), remapping, **settings)
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(configs), remapping, **settings)


def batch(f: list[int], g: list[int], h: list[int]) -> KeyedJaggedTensor:
    """Two samples; each feature's first sample has one id, if there are any."""
    ids = [h, f, g]
    lengths = [[min(1, len(part)), max(0, len(part) - 1)] for part in ids]
    return KeyedJaggedTensor(["h", "f", "g"], torch.tensor([*h, *f, *g]).long(), lengths=torch.tensor(lengths).view(-1))


def learn(collection: Any, times: int = 1) -> Any:
    """Let the collection see ids in training, and give the result."""
    collection.train()
    for _ in range(times):
        collection(batch(LEARNED, LEARNED[:2], [1, 2, 3, 10**15]))
    return collection


class Model(nn.Module):
    """Adds up what a managed-collision collection returns, times its position in the output."""

    def __init__(self, collection: Any) -> None:
        super().__init__()
        self.mc = collection

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, ...]:
        embeddings, remapped = self.mc(features)
        parts = embeddings.to_dict().values() if hasattr(embeddings, "to_dict") else embeddings.values()
        values = [part if isinstance(part, torch.Tensor) else part.values() for part in parts]
        return (*values, *([] if remapped is None else [remapped.values(), remapped.lengths()]))
