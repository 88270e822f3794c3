"""Four ways to train one model on a stream of raw ids: the same rows, seeds, batches and optimizers for all."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from criteo import Rows
from dlrm import auc, build_collection, build_dlrm, predict, sample_of, train
from torch import nn
from torchrec import EmbeddingBagCollection, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

import recfx

ADMITS_EVERY = 10
"""Steps after which managed collisions give rows to the ids that were seen since the last time."""

Tables = Mapping[str, int]
"""The rows of each feature's table."""


class ManagedCollisions(nn.Module):
    """TorchRec's managed collisions, as a DLRM takes them: the pooled rows without the ids that were read."""

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = collection.embedding_bag_configs()
        device = collection.device
        modules = {
            table.name: MCHManagedCollisionModule(
                table.num_embeddings, device, DistanceLFU_EvictionPolicy(), ADMITS_EVERY
            )
            for table in self.tables
        }
        remapping = ManagedCollisionCollection(modules, self.tables)
        self.managed = ManagedCollisionEmbeddingBagCollection(collection, remapping)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.tables

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return self.managed(features)[0]

    def rows_of(self, feature: str, ids: torch.Tensor) -> torch.Tensor:
        module = self.managed._managed_collision_collection._managed_collision_modules[f"table_{feature}"].eval()
        return module.remap({feature: JaggedTensor(ids, lengths=torch.ones_like(ids))})[feature].values()


def modulo(rows: Rows, tables: Tables) -> Rows:
    """The ids modulo the rows of their table."""
    return replace(rows, ids=rows.ids % torch.tensor([tables[feature] for feature in rows.features]))


@dataclass(frozen=True)
class Contestant:
    """A way to train.

    Args:
        name: of the line in the comparison.
        ids: what it gets, ``"modulo"`` the rows of their table or ``"raw"``.
        collection: what becomes of the collection before a DLRM is built around it.
        convert: what becomes of the DLRM, given a sample of its input.
    """

    name: str
    ids: str
    collection: Callable[[EmbeddingBagCollection], nn.Module] = lambda collection: collection
    convert: Callable[[Any, Any], Any] = lambda model, sample: model

    def build(self, tables: Tables, numbers: int, options: argparse.Namespace) -> DLRM:
        """The model before ``convert``."""
        torch.manual_seed(0)
        return build_dlrm(options, self.collection(build_collection(tables, options)), numbers)

    def rows_of(self, model: DLRM, tables: Tables, feature: str, ids: torch.Tensor) -> torch.Tensor:
        """The row of each id; -1 where it has none."""
        collection = model.sparse_arch.embedding_bag_collection
        if self.ids == "modulo":
            return ids % tables[feature]
        if isinstance(collection, ManagedCollisions):
            return collection.rows_of(feature, ids)
        return collection.index(f"table_{feature}").find(ids)


PLAIN = Contestant("EmbeddingBagCollection", "modulo")
MANAGED = Contestant("TorchRec's managed collisions", "raw", collection=ManagedCollisions)
ADOPTED = Contestant("recfx, adopted", "modulo", convert=recfx.convert)
HASHED = Contestant(
    "recfx, hashed",
    "raw",
    convert=lambda model, sample: recfx.convert(model, sample=sample, hashing=recfx.HashConfig.raw_ids()),
)


@dataclass(frozen=True)
class Outcome:
    """What came of a contestant.

    Args:
        original: the model before ``convert``, whose parameters are those of the trained one.
        model: trained.
        auc: on the rows that were held back.
        seconds: the CPU time of a training step.
        bytes: of the tables, and of all that finds rows in them.
        lost: how many different ids of the training had no row of their own in the end.
    """

    original: DLRM
    model: DLRM
    auc: float
    seconds: float
    bytes: int
    lost: int


def run(
    ways: Sequence[Contestant], tables: Tables, training: Rows, held_back: Rows, options: argparse.Namespace
) -> dict[str, Outcome]:
    """Train the contestants side by side, and measure them."""
    originals = [way.build(tables, training.dense.shape[1], options) for way in ways]
    streams = [modulo(training, tables) if way.ids == "modulo" else training for way in ways]
    models = [
        way.convert(original, sample_of(seen, options))
        for way, original, seen in zip(ways, originals, streams, strict=True)
    ]
    outcomes = {}
    for way, original, model, seconds in zip(ways, originals, models, train(models, streams, options), strict=True):
        asked = modulo(held_back, tables) if way.ids == "modulo" else held_back
        quality = auc(held_back, predict(model, asked, options))
        tensors = [*model.sparse_arch.parameters(), *model.sparse_arch.buffers()]
        lost = 0
        for column, feature in enumerate(training.features):
            ids = training.ids[training.present[:, column], column].unique()
            rows = way.rows_of(model, tables, feature, ids.to(options.device)).cpu()
            _, inverse, sharing = rows.unique(return_inverse=True, return_counts=True)
            lost += int(((rows < 0) | (sharing[inverse] > 1)).sum())
        outcomes[way.name] = Outcome(original, model, quality, seconds, sum(tensor.nbytes for tensor in tensors), lost)
    return outcomes
