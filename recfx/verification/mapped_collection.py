"""The standard collection that a hashed one is compared with: its ids are mapped through ``items()``.

The mapping is made here from that listing alone, so that a fault in the index cannot hide itself.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfx.ir.tables import TableSpec
from recfx.modules.collection import HashEmbeddingBagCollection


class MappedCollection(EmbeddingBagCollection):
    """The standard collection over the tables of a hashed one, with a row of zeros after them for ids without a row.

    If ids that are not admitted read a shared row without training it, a copy of all rows follows: reading from the
    copy does not train any row that is compared.

    Args:
        hashed: the converted collection; its weights are copied, and its items are read at every call.
    """

    def __init__(self, hashed: HashEmbeddingBagCollection) -> None:
        configs = []
        for config, table in zip(hashed.embedding_bag_configs(), hashed.tables, strict=True):
            duplicate = copy.copy(config)
            duplicate.num_embeddings = table.num_embeddings + 1 + (table.num_embeddings if _reads_copies(table) else 0)
            duplicate.feature_names = list(table.embedding_names)  # one key per table: each maps ids differently
            configs.append(duplicate)
        super().__init__(configs, hashed.is_weighted(), torch.device("meta"))
        self.__dict__["hashed"] = hashed
        for table in hashed.tables:
            weight = hashed.weight(table.name).detach()
            copies = [weight] if _reads_copies(table) else []
            extended = torch.cat([weight, weight.new_zeros(1, weight.shape[1]), *copies])
            trained = hashed.weight(table.name).requires_grad
            self.embedding_bags[table.name].weight = nn.Parameter(extended, requires_grad=trained)
        self.train(hashed.training)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Map the ids of every feature, then pool as the standard collection does."""
        features = maybe_td_to_kjt(features, None)
        by_feature = features.to_dict()
        strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        keys, values, lengths, weights, key_strides = [], [], [], [], []
        for table in self.hashed.tables:
            for feature, key in zip(table.feature_names, table.embedding_names, strict=True):
                jagged = by_feature[feature]
                keys.append(key)
                values.append(self._map(table, jagged.values().to(torch.int64)))
                lengths.append(jagged.lengths())
                key_strides.append([strides[feature]])
                if self.is_weighted():
                    weights.append(jagged.weights())
        variable = features.variable_stride_per_key()
        mapped = KeyedJaggedTensor(
            keys,
            torch.cat(values),
            torch.cat(weights) if weights else None,
            lengths=torch.cat(lengths),
            stride=None if variable else features.stride(),
            stride_per_key_per_rank=key_strides if variable else None,
            inverse_indices=features.inverse_indices_or_none(),
        )
        return super().forward(mapped)

    def _map(self, table: TableSpec, ids: torch.Tensor) -> torch.Tensor:
        if not table.has_index:
            return ids
        assert table.hashing is not None
        index: Any = self.hashed.hash_indexes[table.name]
        held, rows = (each.to(ids.device) for each in index.items())
        order = held.argsort()
        held, rows = held[order], rows[order]
        place = torch.searchsorted(held, ids).clamp(max=max(held.numel() - 1, 0))
        known = held[place] == ids if held.numel() else torch.zeros_like(ids, dtype=torch.bool)
        found = rows[place] if held.numel() else torch.zeros_like(ids)
        mapped = torch.where(known, found, self._map_absent(table, index, ids))
        dense = (ids >= 0) & (ids < table.hashing.dense_rows)
        return torch.where(dense, ids, mapped)

    def _map_absent(self, table: TableSpec, index: Any, ids: torch.Tensor) -> torch.Tensor:
        config, zeros = table.hashing, torch.full_like(ids, table.num_embeddings)
        assert config is not None
        shared = index.shared_rows(ids)
        unseen = shared if config.unseen == "share" else zeros
        if not self.hashed.training:
            return unseen
        full = shared if config.on_full == "share" else zeros
        if not config.admits:
            return full
        candidates, sightings = (each.to(ids.device) for each in index.candidates())
        admitted = torch.isin(ids, candidates[sightings >= config.admit_after])
        return torch.where(admitted, full, shared + zeros + 1 if _reads_copies(table) else zeros)


def _reads_copies(table: TableSpec) -> bool:
    return table.admits and table.hashing is not None and table.hashing.unseen == "share"
