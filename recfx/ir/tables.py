"""What the compiler knows of a table: a frozen description that nodes and passes share."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from recfx.hashing import ResolvedHashConfig


@dataclass(frozen=True)
class TableSpec:
    """One table of a collection.

    Args:
        name: table name, unique in its collection.
        feature_names: keys of the batch that read this table.
        embedding_names: their keys in the output; ``feature@table`` where a feature reads several tables.
        num_embeddings: physical rows.
        embedding_dim: columns.
        pooling: ``"SUM"`` or ``"MEAN"``.
        hashing: how raw ids become rows; ``None`` leaves the table static.
        weight_init_min: lower end of a new row's uniform initial weights.
        weight_init_max: upper end.
        dtype: of its stored rows.
        output_dtype: of its columns in the output, and on the wire. The standard collection's is float32 for rows of
            any dtype.
        custom_init_fn: the table brings its own ``init_fn``; new rows keep what it filled in.
        shard_of: name of the table that this is a shard of; ``""`` for a whole table. ``name`` tells shards on one rank
            apart, ``num_embeddings`` and ``embedding_dim`` are the shard's, ``hashing`` is the table's.
        shard_keys: a shard's keys in the output; ``embedding_names`` are its keys among those of its rank.
        first_row: of the table, in a shard.
        first_column: of the table, in a shard.
    """

    name: str
    feature_names: tuple[str, ...]
    embedding_names: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    pooling: str
    hashing: ResolvedHashConfig | None
    weight_init_min: float
    weight_init_max: float
    dtype: torch.dtype = torch.float32
    output_dtype: torch.dtype = torch.float32
    custom_init_fn: bool = False
    shard_of: str = ""
    shard_keys: tuple[str, ...] = ()
    first_row: int = 0
    first_column: int = 0

    @property
    def table_name(self) -> str:
        """Name of the table, also for a shard."""
        return self.shard_of or self.name

    @property
    def output_keys(self) -> tuple[str, ...]:
        """Keys of the output that its columns belong to."""
        return self.shard_keys or self.embedding_names

    def __deepcopy__(self, memo: dict[int, Any]) -> TableSpec:
        return self  # frozen: copies of a model share it

    @property
    def has_index(self) -> bool:
        """Whether raw ids go through an index before they are rows."""
        return self.hashing is not None and self.hashing.has_index

    @property
    def evicts(self) -> bool:
        """Whether ids lose their rows to new ones."""
        return self.has_index and self.hashing is not None and self.hashing.evicts

    @property
    def admits(self) -> bool:
        """Whether ids are counted before they get a row."""
        return self.has_index and self.hashing is not None and self.hashing.admits


def embedding_names(tables: tuple[TableSpec, ...]) -> list[str]:
    """Output keys of ``tables``, in order."""
    return [name for table in tables for name in table.embedding_names]


def embedding_dims(tables: tuple[TableSpec, ...]) -> list[int]:
    """Columns of each output key of ``tables``, in order."""
    return [table.embedding_dim for table in tables for _ in table.embedding_names]


def output_dtype(tables: Iterable[TableSpec]) -> torch.dtype:
    """Of a tensor that has columns of all ``tables``; float32 where there are none."""
    dtypes = {table.output_dtype for table in tables}
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32
