"""Models behind managed collisions, whose batches have ids that their modules have learned."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.models.sample import Sample
from tests.builders.managed_collisions import DIM, LEARNED, batch, hash_zch, managed, mch
from tests.models.case import Case

_LONGEST = 3
_IDS = torch.tensor(LEARNED)


class ManagedTower(nn.Module):
    """A collection of raw ids and a layer."""

    def __init__(self, collection: nn.Module, is_pooled: bool) -> None:
        super().__init__()
        self.mc, self.is_pooled = collection, is_pooled
        self.linear = nn.Linear(DIM, 3)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        embeddings, _ = self.mc(features)
        f, g, h = embeddings["f"], embeddings["g"], embeddings["h"]
        if not self.is_pooled:
            f, g, h = (part.to_padded_dense(_LONGEST) for part in (f, g, h))
        return self.linear(f - 2 * g * h)


def _learned(is_pooled: bool, make: Callable[[], Any], **settings: Any) -> nn.Module:
    collection = managed(is_pooled, make, **settings)
    for _ in range(2):
        collection.train()(batch(LEARNED, LEARNED, LEARNED))
    return ManagedTower(collection, is_pooled)


def _in_slots(is_pooled: bool) -> nn.Module:
    """HashZch, with the ids in the slots where training on a GPU has put them."""
    collection = managed(is_pooled, lambda: hash_zch())
    for module in collection._managed_collision_collection._managed_collision_modules.values():
        module._hash_zch_identities.data[[9, 4, 0, 7, 5], 0] = _IDS
    return ManagedTower(collection, is_pooled).eval()


def _known(batch_size: int) -> Sample:
    lengths = torch.randint(0, _LONGEST + 1, (3 * batch_size,))
    ids = _IDS[torch.randint(0, len(LEARNED), (int(lengths.sum()),))]
    return Sample(KeyedJaggedTensor(["h", "f", "g"], ids, lengths=lengths))


MANAGED = [
    Case("mch_pooled", lambda: _learned(True, mch), _known),
    Case("mch_sequence", lambda: _learned(False, mch), _known),
    Case("hash_zch_pooled", lambda: _in_slots(True), _known),
    Case("hash_zch_sequence", lambda: _in_slots(False), _known),
]
"""They are converted with ``managed_collisions="convert"``. On a CPU, HashZch runs in eval mode alone."""
