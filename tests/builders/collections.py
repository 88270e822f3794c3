"""Small standard collections and their tables."""

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

ROWS = 20


def table(
    name: str,
    features: Sequence[str],
    *,
    dim: int = 8,
    rows: int = ROWS,
    pooling: PoolingType = PoolingType.SUM,
    **options: object,
) -> EmbeddingBagConfig:
    """A config; ``options`` are ``EmbeddingBagConfig``'s."""
    return EmbeddingBagConfig(
        name=name, feature_names=list(features), embedding_dim=dim, num_embeddings=rows, pooling=pooling, **options
    )


def two_tables(dim: int = 8) -> list[EmbeddingBagConfig]:
    """``t1`` of ``f1`` (SUM) and ``t2`` of ``f2`` and ``f3`` (MEAN)."""
    return [table("t1", ["f1"], dim=dim), table("t2", ["f2", "f3"], dim=dim, pooling=PoolingType.MEAN)]


def collection(dim: int = 8) -> EmbeddingBagCollection:
    """The standard collection of ``two_tables``."""
    return EmbeddingBagCollection(tables=two_tables(dim))


def one_table(features: Sequence[str] = ("f",), *, rows: int = 10, dim: int = 4) -> EmbeddingBagCollection:
    """A standard collection of the table ``t``, by default ten rows of four columns for the feature ``f``."""
    return EmbeddingBagCollection([table("t", features, rows=rows, dim=dim)])


def tables_named(*names: str, rows: int = 10, dim: int = 4, **options: object) -> EmbeddingBagCollection:
    """A standard collection with one table per name, for the feature of the same name; ``options`` as for ``table``."""
    return EmbeddingBagCollection([table(name, [name], rows=rows, dim=dim, **options) for name in names])


def sequence_table(
    name: str, features: Sequence[str], *, dim: int = 8, rows: int = ROWS, **options: object
) -> EmbeddingConfig:
    """A config of a table whose rows are not pooled; ``options`` are ``EmbeddingConfig``'s."""
    return EmbeddingConfig(name=name, feature_names=list(features), embedding_dim=dim, num_embeddings=rows, **options)


def sequences(dim: int = 8, features: Sequence[str] = ("f1", "f2", "f3"), **options: object) -> EmbeddingCollection:
    """The standard collection of ``s1`` of ``f1`` and ``s2`` of ``f2`` and ``f3``; ``options`` are the collection's."""
    first, *others = features
    return EmbeddingCollection(
        [sequence_table("s1", [first], dim=dim), sequence_table("s2", others, dim=dim)], **options
    )


def sharded_sequences() -> nn.Module:
    """``sequences()`` as TorchRec shards it, in the process group of one rank."""
    standard, env = sequences(), ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    plan = construct_module_sharding_plan(
        standard, {"s1": table_wise(rank=0), "s2": table_wise(rank=0)}, local_size=1, world_size=1, device_type="cpu"
    )
    return EmbeddingCollectionSharder().shard(standard, plan, env, torch.device("cpu"))
