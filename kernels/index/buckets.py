"""Which bucket an id belongs to, and which rows a bucket owns. Neither depends on the number of ranks.

The rows from ``dense_rows`` on are divided into buckets; bucket ``b`` owns the rows from ``bucket_begin(b)`` to
``bucket_begin(b + 1)``. An id belongs to bucket ``mixed_modulo(id, buckets, seed)``.
"""

import torch
from torch import Tensor

from recfx.kernels.index.mix64 import mix64, mixed_modulo


def bucket_begin(bucket: int, rows: int, dense_rows: int, buckets: int) -> int:
    """The first row of a bucket; for ``bucket == buckets``, the end of the last one."""
    return dense_rows + bucket * (rows - dense_rows) // buckets


def bucket_begins(bucket: Tensor, rows: int, dense_rows: int, buckets: int) -> Tensor:
    """``bucket_begin`` for a tensor of buckets. Scriptable."""
    return dense_rows + torch.div(bucket * (rows - dense_rows), buckets, rounding_mode="floor")


def bucket_from(row: int, rows: int, dense_rows: int, buckets: int) -> int:
    """The first bucket that begins at or after this row; ``buckets`` if none does."""
    index_rows = rows - dense_rows
    return (max(0, row - dense_rows) * buckets + index_rows - 1) // index_rows


def bucket_of(ids: Tensor, buckets: int, seed: int) -> Tensor:
    """The bucket of each id, int64 ``[n]``. Scriptable. Meaningless for ids below ``dense_rows``."""
    return mixed_modulo(ids, buckets, seed)


def home_rows(ids: Tensor, rows: int, dense_rows: int, buckets: int, seed: int) -> Tensor:
    """The home row of each id, int64 ``[n]``: the owner of that row of the table owns the id. Scriptable.

    The home row of a dense id is its own row; that of any other id is the first row of its bucket.
    """
    is_dense = (ids >= 0) & (ids < dense_rows)
    return torch.where(is_dense, ids, bucket_begins(bucket_of(ids, buckets, seed), rows, dense_rows, buckets))


def shared_rows(ids: Tensor, rows: int, dense_rows: int, buckets: int, seed: int) -> Tensor:
    """The row of its bucket that each id reads if it has none of its own: chosen by its hash (the hashing trick), or,
    for ``-buckets``, the last one. Scriptable.
    """
    if buckets < 0:
        return bucket_begins(bucket_of(ids, -buckets, seed) + 1, rows, dense_rows, -buckets) - 1
    bucket = bucket_of(ids, buckets, seed)
    begin = bucket_begins(bucket, rows, dense_rows, buckets)
    end = bucket_begins(bucket + 1, rows, dense_rows, buckets)
    return begin + torch.remainder(mix64(ids, seed + 1) & 0x7FFFFFFFFFFFFFFF, end - begin)
