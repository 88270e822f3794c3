"""The converted collections and configs that users build, and what the sharded ones of each kind share with them."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import POOLED, SEQUENCE, CollectionKind, check_config
from recfx.errors import ConversionError
from recfx.errors.argument_types import typed
from recfx.hashing import HashConfig


class PooledCollection(ConvertedCollection):
    """Pooled embeddings."""

    _kind = POOLED
    embedding_bags: nn.ModuleDict
    _embedding_bag_configs: list[EmbeddingBagConfig]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of the whole tables, in order; ``num_embeddings`` are physical rows."""
        return self._embedding_bag_configs


class SequenceCollection(ConvertedCollection):
    """Embeddings of which each id has its own row."""

    _kind = SEQUENCE
    embeddings: nn.ModuleDict
    _embedding_configs: list[EmbeddingConfig]
    _use_gather_select, _use_gather_select_per_sharding = False, None  # for TorchRec's methods

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """As ``embedding_bag_configs``."""
        return self._embedding_configs

    def need_indices(self) -> bool:
        """Whether the output has the ids as well, as weights of its ``JaggedTensor``s."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """The number of columns, which is the same for all tables."""
        return self.tables[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """The keys of each table in the output."""
        return [list(table.embedding_names) for table in self.tables]


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


@dataclass
class HashEmbeddingConfig(EmbeddingConfig):
    """A table of raw 64-bit ids: TorchRec's config and how its ids become rows.

    Example:
        >>> recfx.HashEmbeddingConfig(name="users", num_embeddings=100, embedding_dim=8, feature_names=["user"])
        HashEmbeddingConfig(...)

    Args:
        hashing: see :class:`HashConfig`; by default the index gives out every row.
    """

    hashing: HashConfig = field(default_factory=HashConfig)

    def __post_init__(self) -> None:
        check_config(self, SEQUENCE)  # before TorchRec divides by the rows
        super().__post_init__()


class HashEmbeddingBagCollection(PooledCollection, UnshardedCollection, EmbeddingBagCollection):
    """Pooled embeddings of raw or dense ids; input and output are those of ``torchrec.EmbeddingBagCollection``.

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
        self, tables: list[EmbeddingBagConfig], is_weighted: bool = False, device: torch.device | str | None = None, *,
        backend: str = "auto",
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self._build(list(tables), is_weighted, device, backend)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """``features``: a KJT (or TensorDict) with at least the collection's keys, in any order.

        Returns:
            ``[B, D]`` keyed tensor, keys in the order of the tables and their features.
        """
        return self._enter(self._run, self._run, features)


class HashEmbeddingCollection(SequenceCollection, UnshardedCollection, EmbeddingCollection):
    """Embeddings of raw or dense ids, one row per id; input and output are those of ``torchrec.EmbeddingCollection``.

    Parameters are ``embeddings.<table>.weight``, as in the standard collection; index state is
    ``hash_indexes.<table>.*``.

    Example:
        >>> from torchrec import EmbeddingConfig
        >>> users = EmbeddingConfig(name="users", num_embeddings=100, embedding_dim=8, feature_names=["user"])
        >>> collection = recfx.HashEmbeddingCollection([users])
        >>> collection(batch)["user"].values().shape  # one row per id
        torch.Size([3, 8])

    Args:
        tables: configs; plain ``EmbeddingConfig`` are hashed with ``HashConfig()``. All have one ``embedding_dim``.
        device: device of the tables; ``"meta"`` allocates nothing.
        need_indices: whether the output has the raw ids, as weights of its ``JaggedTensor``s.
        backend: kernel target of the lookups.

    Raises:
        ConversionError: a table or setting is not supported.
        ValueError: two tables have the same name, or different numbers of columns.
    """

    @typed(ConversionError)
    def __init__(
        self, tables: list[EmbeddingConfig], device: torch.device | str | None = None, need_indices: bool = False, *,
        backend: str = "auto",
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self._need_indices = need_indices
        for config in tables:
            check_config(config, SEQUENCE)
            if config.embedding_dim != tables[0].embedding_dim:
                raise ValueError(
                    f"table {config.name!r} has embedding_dim {config.embedding_dim}, and table {tables[0].name!r} "
                    f"{tables[0].embedding_dim}: the tables of one collection need the same"
                )
        self._build(list(tables), False, device, backend)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """``features``: a KJT (or TensorDict) with at least the collection's keys, in any order.

        Returns:
            for each key, in the order of the tables and their features, a ``JaggedTensor`` whose values are float32
            ``[n, embedding_dim]``, a row for each id in the order of the ids, with the lengths of the feature.
        """
        return self._enter(self._run, self._run, features)


CONVERTED_CLASSES: dict[CollectionKind, type[UnshardedCollection]] = {
    POOLED: HashEmbeddingBagCollection,
    SEQUENCE: HashEmbeddingCollection,
}
"""The class that takes the place of the standard one of each kind, unsharded; one line per kind."""


def all_converted_classes(kind: CollectionKind) -> list[type[UnshardedCollection]]:
    """That class, and its subclasses, such as those that stand for subclasses of the standard one."""
    converted = CONVERTED_CLASSES[kind]
    return [converted, *converted.__subclasses__()]
