"""Tables and batches for tests: small, seeded, with empty bags."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

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


def batch(
    batch_size: int,
    keys: Sequence[str] = ("f1", "f2", "f3"),
    *,
    rows: int = ROWS,
    weighted: bool = False,
    longest: int = 4,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    """Random bags of 0 to ``longest`` ids below ``rows``, from torch's generator."""
    lengths = torch.randint(0, longest + 1, (len(keys) * batch_size,), dtype=dtype)
    total = int(lengths.sum())
    return KeyedJaggedTensor(
        list(keys),
        torch.randint(0, rows, (total,), dtype=dtype),
        torch.rand(total) if weighted else None,
        lengths=lengths,
        stride=batch_size,
    )
