"""Which bucket an id belongs to, and which rows are the bucket's. The same for any number of ranks.

The rows from ``dense_rows`` on are cut into buckets; bucket ``b`` owns the rows from ``bucket_begin(b)`` to
``bucket_begin(b + 1)``. An id belongs to bucket ``mixed_modulo(id, buckets, seed)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mix64 import mix64, mixed_modulo


def bucket_begin(bucket: int, rows: int, dense_rows: int, buckets: int) -> int:
    """First row of a bucket; for ``bucket == buckets`` the end of the last one."""
    return dense_rows + bucket * (rows - dense_rows) // buckets


def bucket_begins(bucket: Tensor, rows: int, dense_rows: int, buckets: int) -> Tensor:
    """``bucket_begin`` of a tensor of buckets. Scriptable."""
    return dense_rows + torch.div(bucket * (rows - dense_rows), buckets, rounding_mode="floor")


def bucket_from(row: int, rows: int, dense_rows: int, buckets: int) -> int:
    """The first bucket that begins at this row or behind it; ``buckets`` if none does."""
    index_rows = rows - dense_rows
    return (max(0, row - dense_rows) * buckets + index_rows - 1) // index_rows


def bucket_of(ids: Tensor, buckets: int, seed: int) -> Tensor:
    """The bucket of each id, int64 ``[n]``. Scriptable. Means nothing for ids below ``dense_rows``."""
    return mixed_modulo(ids, buckets, seed)


def home_rows(ids: Tensor, rows: int, dense_rows: int, buckets: int, seed: int) -> Tensor:
    """A row of the table, int64 ``[n]``, for each id: whoever owns it owns the id. Scriptable.

    Of dense ids it is their own, of others the first of their bucket.
    """
    is_dense = (ids >= 0) & (ids < dense_rows)
    return torch.where(is_dense, ids, bucket_begins(bucket_of(ids, buckets, seed), rows, dense_rows, buckets))


def shared_rows(ids: Tensor, rows: int, dense_rows: int, buckets: int, seed: int) -> Tensor:
    """The row of its bucket that an id without a row of its own shares, by hash (the hashing trick). Scriptable."""
    bucket = bucket_of(ids, buckets, seed)
    begin = bucket_begins(bucket, rows, dense_rows, buckets)
    end = bucket_begins(bucket + 1, rows, dense_rows, buckets)
    return begin + torch.remainder(mix64(ids, seed + 1) & 0x7FFFFFFFFFFFFFFF, end - begin)
