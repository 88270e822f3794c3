"""Columns of output keys: how pooled parts say what they hold while tables are cut by columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from recfx.ir.tables import TableSpec


class Columns(NamedTuple):
    """Adjacent columns of one output key.

    Args:
        key: the key, ``feature`` or ``feature@table``.
        first: the first of the key's columns that are meant.
        dim: how many.
        dtype: of pooled values.
    """

    key: str
    first: int
    dim: int
    dtype: torch.dtype = torch.float32


def columns_of(tables: tuple[TableSpec, ...]) -> list[Columns]:
    """What lookups of ``tables``, or of shards of tables, hold of the output keys, in order."""
    return [
        Columns(key, table.first_column, table.embedding_dim, table.output_dtype)
        for table in tables
        for key in table.output_keys
    ]


def total_dim(columns: list[Columns]) -> int:
    """Columns of a tensor that holds these."""
    return sum(each.dim for each in columns)


def total_bytes(columns: Iterable[Columns]) -> int:
    """Bytes of one row of such a tensor."""
    return sum(each.dim * each.dtype.itemsize for each in columns)
