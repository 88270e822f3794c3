"""Columns of output keys: how pooled parts say what they hold while tables are cut by columns."""

from __future__ import annotations

from typing import NamedTuple

from recfx.ir.tables import TableSpec


class Columns(NamedTuple):
    """Adjacent columns of one output key.

    Args:
        key: the key, ``feature`` or ``feature@table``.
        first: the first of the key's columns that are meant.
        dim: how many.
    """

    key: str
    first: int
    dim: int


def whole_columns(tables: tuple[TableSpec, ...]) -> list[Columns]:
    """All columns of ``tables``, in order."""
    return [Columns(name, 0, table.embedding_dim) for table in tables for name in table.embedding_names]


def total_dim(columns: list[Columns]) -> int:
    """Columns of a tensor that holds these."""
    return sum(each.dim for each in columns)
