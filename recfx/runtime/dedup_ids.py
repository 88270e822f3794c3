"""``dedup_ids``: the different ids of each key, before they are sent to other ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.kernels.route.different_ids import different_ids
from recfx.runtime.bags import as_sent, keep_ids
from recfx.runtime.base import NodeModule


class Inverse(NamedTuple):
    """Which of the different ids each id is.

    Args:
        numbers: int64 ``[n]``, key by key: the number of each id among the different ones of its key.
        ids: how many ids each key has.
        different: how many of them are different.
    """

    numbers: torch.Tensor
    ids: list[int]
    different: list[int]


class DedupIds(NodeModule):
    """Leave out all but the first of the equal ids of a key.

    Args:
        deduped: for each key, whether its ids are deduplicated; others leave as they come.
        on_host: whether ids are copied to the host.

    Attributes:
        ids: how many ids of deduplicated keys have come in training, for reports.
        different: how many of them were sent.
    """

    def __init__(self, deduped: list[bool], on_host: bool = False) -> None:
        super().__init__()
        self.deduped, self.on_host = deduped, on_host
        self.ids, self.different = [0] * len(deduped), [0] * len(deduped)

    def forward(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Inverse]:
        """``features``: as selected. Returns ids in the same bags, int64, each at its first place; and the inverse."""
        features = as_sent(features, self.on_host)
        if features.weights_or_none() is not None:  # they multiply nothing here, and do not travel
            features = KeyedJaggedTensor(
                features.keys(), features.values(), lengths=features.lengths(), stride=features.stride()
            )
        ids = features.length_per_key()
        is_first, numbers, different = different_ids(features.values(), ids, self.deduped)
        if self.training:
            for key, deduped in enumerate(self.deduped):
                if deduped:
                    self.ids[key] += ids[key]
                    self.different[key] += different[key]
        return keep_ids(features, features.values(), is_first), Inverse(numbers, ids, different)
