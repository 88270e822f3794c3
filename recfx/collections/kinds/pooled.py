"""Pooled collections: ``EmbeddingBagCollection``, which sums or averages the rows of a sample's ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType, data_type_to_dtype, pooling_type_to_str
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface

from recfx.collections.kinds.collection_kind import CollectionKind, plain_table
from recfx.errors import ConversionError


class PooledKind(CollectionKind):
    """See ``CollectionKind``."""

    def is_weighted(self, collection: Any) -> bool:
        """Whether ids have weights, by which their rows are multiplied."""
        return bool(collection.is_weighted())

    def empty_like(self, converted: Any) -> EmbeddingBagCollection:
        return EmbeddingBagCollection(self.configs_of(converted), converted.is_weighted(), torch.device("meta"))

    def values_of(self, output: Any) -> Mapping[str, torch.Tensor]:
        """``[B, dim]`` of each key of a ``KeyedTensor``."""
        values: dict[str, torch.Tensor] = output.to_dict()
        return values

    def new_table(self, config: Any, rows: int, device: torch.device | str | None) -> nn.EmbeddingBag:
        return nn.EmbeddingBag(
            rows,
            config.embedding_dim,
            mode=pooling_type_to_str(config.pooling),
            device=device,
            include_last_offset=True,
            dtype=data_type_to_dtype(config.data_type),
        )

    def table_around(self, rows: torch.Tensor, pooling: str) -> nn.EmbeddingBag:
        count, dim = rows.shape
        return nn.EmbeddingBag(count, dim, mode=pooling.lower(), _weight=rows, include_last_offset=True)

    def check_table(self, config: Any, table: nn.Module, is_weighted: bool, collection: str) -> nn.EmbeddingBag:
        """``table``, if a batched lookup of its weight does the same.

        Raises:
            ConversionError: ``weighted_mean``, ``unsupported_pooling``, ``unsupported_bag``,
                ``unsupported_bag_option``.
        """
        plain: nn.EmbeddingBag = plain_table(self, config, table, collection, _mode_differs(config, table))
        _check_pooling(config, is_weighted, collection)
        return plain

    def pooling(self, config: Any) -> str:
        """``"SUM"`` or ``"MEAN"``."""
        name: str = config.pooling.name
        return name


POOLED = PooledKind(
    name="pooled",
    standard=EmbeddingBagCollection,
    interface=EmbeddingBagCollectionInterface,
    sharded=ShardedEmbeddingBagCollection,
    config=EmbeddingBagConfig,
    configs="embedding_bag_configs",
    tables="embedding_bags",
    holder=nn.EmbeddingBag,
    call_arguments=frozenset(("input", "offsets", "per_sample_weights")),
    assembled_by="keyed_tensor",
    sharder=EmbeddingBagCollectionSharder,
)
"""The kind of ``EmbeddingBagCollection``."""


def _mode_differs(config: EmbeddingBagConfig, bag: nn.Module) -> str:
    """What is wrong with how a bag pools, as the end of a sentence; ``""`` if nothing is."""
    if not isinstance(bag, nn.EmbeddingBag) or bag.mode.upper() == config.pooling.name:
        return ""
    return f"pools by {bag.mode}, but its config says {config.pooling.name}"


def _check_pooling(config: EmbeddingBagConfig, is_weighted: bool, collection: str) -> None:
    if config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
        raise ConversionError(
            f"table {config.name!r} has pooling {config.pooling.name}.",
            reason="unsupported_pooling",
            module_path=collection,
            what_to_do="use SUM or MEAN.",
        )
    if is_weighted and config.pooling is PoolingType.MEAN:
        raise ConversionError(
            f"table {config.name!r} is MEAN in a weighted collection, which the standard collection refuses as well.",
            reason="weighted_mean",
            module_path=collection,
            what_to_do="use PoolingType.SUM, and divide the weights as you intend.",
        )
