"""Columns of output keys: they describe what a pooled part holds when tables are cut by columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from recfx.ir.tables import TableSpec


class Columns(NamedTuple):
    """Adjacent columns of one output key.

    Args:
        key: the key, ``feature`` or ``feature@table``.
        first: the first of these columns within the key.
        dim: the number of columns.
        dtype: the dtype of pooled values.
    """

    key: str
    first: int
    dim: int
    dtype: torch.dtype = torch.float32


def columns_of(tables: tuple[TableSpec, ...]) -> list[Columns]:
    """The columns of output keys that lookups of ``tables`` (or of shards of tables) produce, in order."""
    return [
        Columns(key, table.first_column, table.embedding_dim, table.output_dtype)
        for table in tables
        for key in table.output_keys
    ]


def total_dim(columns: list[Columns]) -> int:
    """The number of columns of a tensor that holds ``columns``."""
    return sum(each.dim for each in columns)


def total_bytes(columns: Iterable[Columns]) -> int:
    """The bytes of one row of a tensor that holds ``columns``."""
    return sum(each.dim * each.dtype.itemsize for each in columns)
