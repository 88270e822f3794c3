"""Small batches: random ones, and ones that a test spells out."""

from collections.abc import Mapping, Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.builders.collections import ROWS

RAW_ID = 2**60  # an id that only an index can read


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


def bags(features: Mapping[str, Sequence[Sequence[int]]], weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    """A batch spelled out: the bags of each feature, one per sample.

    Args:
        features: the ids of each bag, by feature.
        weights: one per id, in the same order; None for an unweighted batch.
    """
    listed = [bag for feature in features.values() for bag in feature]
    ids = torch.tensor([id_ for bag in listed for id_ in bag], dtype=torch.int64)
    return KeyedJaggedTensor(list(features), ids, weights, lengths=torch.tensor([len(bag) for bag in listed]))


def raw_batch() -> KeyedJaggedTensor:
    """One sample of ``f1``, ``f2`` and ``f3``, which a collection without an index refuses."""
    return bags({"f1": [[RAW_ID]], "f2": [[2]], "f3": [[3]]})


def one_bag(*ids: int, feature: str = "f", weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    return bags({feature: [ids]}, weights)


def two_bags(*ids: int, feature: str = "f") -> KeyedJaggedTensor:
    """Two samples of one feature; the last id is the second sample's."""
    return bags({feature: [ids[:-1], ids[-1:]]})
