"""Converted pooled collections: the class and the config that users build, and what sharded ones share with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, get_type_hints

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recfx.argument_types import typed
from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import POOLED
from recfx.collections.table_specs import check_config
from recfx.errors import ConversionError
from recfx.hashing import HashConfig

_Pooled = TypeVar("_Pooled", bound="PooledCollection")


class PooledCollection(ConvertedCollection):
    """Pooled embeddings."""

    _kind = POOLED
    embedding_bags: nn.ModuleDict
    _embedding_bag_configs: list[EmbeddingBagConfig]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of the whole tables, in order; ``num_embeddings`` are physical rows.

        Example:
            >>> recfx.convert(Model()).ebc.embedding_bag_configs()[0].name
            'users'
        """
        return self._embedding_bag_configs

    def path_of_root(self) -> str:
        """The name under which a graph finds the collection if the collection is the root of the trace."""
        return "embedding_bag_collection"

    @property
    def embedding_bag_collection(self: _Pooled) -> _Pooled:
        """This collection itself, which the graph of ``torch.fx.symbolic_trace(collection)`` calls."""
        return self


@dataclass
class HashEmbeddingBagConfig(EmbeddingBagConfig):
    """A table of raw 64-bit ids: TorchRec's config and how its ids become rows.

    Example:
        >>> recfx.HashEmbeddingBagConfig(
        ...     name="users", num_embeddings=100, embedding_dim=8, feature_names=["user"],
        ...     hashing=recfx.HashConfig(on_full="share"),
        ... ).hashing.on_full
        'share'

    Args:
        hashing: see :class:`HashConfig`; by default the index gives out every row.
    """

    hashing: HashConfig = field(default_factory=HashConfig)

    def __post_init__(self) -> None:
        check_config(self, POOLED)  # before TorchRec divides by the rows
        super().__post_init__()


class HashEmbeddingBagCollection(PooledCollection, UnshardedCollection, EmbeddingBagCollectionInterface):
    """Pooled embeddings of raw or dense ids; input and output are those of ``torchrec.EmbeddingBagCollection``.

    What its graph is, and when it is made again, is in ``UnshardedCollection``.
    Parameters are ``embedding_bags.<table>.weight``, as in the standard collection; index state is
    ``hash_indexes.<table>.*``.

    Example:
        >>> users = EmbeddingBagConfig(name="users", num_embeddings=100, embedding_dim=8, feature_names=["user"])
        >>> collection = recfx.HashEmbeddingBagCollection([users])
        >>> collection(batch)["user"].shape
        torch.Size([2, 8])

    Args:
        tables: configs; plain ``EmbeddingBagConfig`` are hashed with ``HashConfig()``.
        is_weighted: whether batches carry per-id weights (SUM tables only).
        device: device of the tables; ``"meta"`` allocates nothing.
        backend: kernel target of the lookups.

    Raises:
        ConversionError: a table or setting is not supported.
        ValueError: two tables have the same name.
    """

    @typed(ConversionError)
    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self._build(list(tables), is_weighted, device, backend)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """``features``: a KJT (or TensorDict) with at least the collection's keys, in any order.

        Returns:
            ``[B, D]`` keyed tensor, keys in the order of the tables and their features.
        """
        pooled: KeyedTensor = self._enter(self._run, self._run, features)
        return pooled


# Graphs of `torch.fx.symbolic_trace` name these types; as strings they could not be pickled.
HashEmbeddingBagCollection.forward.__annotations__ = get_type_hints(HashEmbeddingBagCollection.forward)
