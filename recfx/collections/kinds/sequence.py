"""Sequence collections: ``EmbeddingCollection``, whose output has a row for each id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection, EmbeddingCollectionInterface

from recfx.collections.kinds.collection_kind import CollectionKind, plain_table
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.versions.differences import SEQUENCE_SETTINGS


class SequenceKind(CollectionKind):
    """See ``CollectionKind``."""

    def is_weighted(self, collection: Any) -> bool:
        """False: the weights of ids are ignored."""
        return False

    def settings_of(self, collection: Any) -> dict[str, Any]:
        """Whether the output has the ids, and how TorchRec's sharded collection puts rows into order."""
        return {f"_{name}": getattr(collection, f"_{name}") for name in SEQUENCE_SETTINGS}

    def empty_like(self, converted: Any) -> EmbeddingCollection:
        settings = {name.removeprefix("_"): value for name, value in self.settings_of(converted).items()}
        return EmbeddingCollection(self.configs_of(converted), torch.device("meta"), **settings)

    def values_of(self, output: Any) -> Mapping[str, torch.Tensor]:
        """``[n, dim]`` of each key of a dict of ``JaggedTensor``s."""
        return {key: jagged.values() for key, jagged in output.items()}

    def new_table(self, config: Any, rows: int, device: torch.device | str | None) -> nn.Embedding:
        """An ``nn.Embedding`` as TorchRec makes it, which is float16 for whatever is not ``DataType.FP32``."""
        dtype = torch.float32 if config.data_type == DataType.FP32 else torch.float16
        return nn.Embedding(rows, config.embedding_dim, device=device, dtype=dtype)

    def table_around(self, rows: torch.Tensor, pooling: str) -> nn.Embedding:
        count, dim = rows.shape
        return nn.Embedding(count, dim, _weight=rows)

    def check_table(self, config: Any, table: nn.Module, is_weighted: bool, collection: str) -> nn.Embedding:
        """``table``, if a batched lookup of its weight does the same.

        Raises:
            ConversionError: ``unsupported_bag``, ``unsupported_bag_option``.
        """
        plain: nn.Embedding = plain_table(self, config, table, collection)
        return plain

    def pooling(self, config: Any) -> str:
        """``"NONE"``."""
        return NOT_COMBINED


SEQUENCE = SequenceKind(
    name="sequence",
    standard=EmbeddingCollection,
    interface=EmbeddingCollectionInterface,
    sharded=ShardedEmbeddingCollection,
    config=EmbeddingConfig,
    configs="embedding_configs",
    tables="embeddings",
    holder=nn.Embedding,
    call_arguments=frozenset(("input",)),
    assembled_by="jagged_dict",
    sharder=EmbeddingCollectionSharder,
)
"""The kind of ``EmbeddingCollection``."""
