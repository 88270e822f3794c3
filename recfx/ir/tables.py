"""What the compiler knows about a table, as frozen data: its description, its output columns, and its shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from recfx.errors import Diagnostic
from recfx.ir.dedup import WHERE_IT_PAYS, Dedup, different, why_not
from recfx.ir.meta import Frozen, mean_length

if TYPE_CHECKING:
    from recfx.hashing import ResolvedHashConfig


class KeyOrder(tuple[str, ...]):
    """A tuple of keys that finds the position of a key without a search, which would be quadratic for many tables."""

    @classmethod
    def of(cls, keys: Iterable[str]) -> KeyOrder:
        """A ``KeyOrder`` of ``keys``, or ``keys`` itself if it already is one, to share the computed positions."""
        return keys if isinstance(keys, KeyOrder) else cls(keys)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The position of each key; if a key appears twice, its first position."""
        return {key: position for position, key in reversed(list(enumerate(self)))}


@dataclass(frozen=True)
class IdRange:
    """The lowest and the highest id that are declared for a feature, as its ids reach their collection."""

    lower: int
    upper: int

    def __str__(self) -> str:
        return f"{self.lower} to {self.upper}"

    def __or__(self, other: IdRange) -> IdRange:
        return IdRange(min(self.lower, other.lower), max(self.upper, other.upper))


@dataclass(frozen=True, repr=False)
class TableSpec(Frozen):
    """One table of a collection."""

    name: str  # table name, unique in its collection
    feature_names: tuple[str, ...]  # the keys of the batch that read this table
    embedding_names: tuple[str, ...]  # their keys in the output; ``feature@table`` if a feature reads several tables
    num_embeddings: int  # the number of physical rows
    embedding_dim: int  # the number of columns
    pooling: str  # what becomes of the rows of one sample: ``"SUM"``, ``"MEAN"``, or ``"NONE"`` if each stays as it is
    hashing: ResolvedHashConfig | None  # how raw ids become rows; ``None`` leaves the table static
    weight_init_min: float  # the lower end of the uniform distribution of a new row's initial weights
    weight_init_max: float  # its upper end
    dtype: torch.dtype = torch.float32  # the dtype of stored rows
    # the dtype of its columns in the output and in collectives. In the standard collection it is float32 whatever
    # the dtype of the rows is.
    output_dtype: torch.dtype = torch.float32
    # whether the table has its own ``init_fn``; new rows keep the values that it filled in
    custom_init_fn: bool = False
    # the name of the table that this is a shard of; ``""`` for a whole table. In a shard, ``name`` tells shards
    # on one rank apart, ``num_embeddings`` and ``embedding_dim`` are the shard's, and ``hashing`` is the table's.
    shard_of: str = ""
    # the keys of a shard in the output; ``embedding_names`` are its keys among the keys of its rank
    shard_keys: tuple[str, ...] = ()
    first_row: int = 0  # the table's row at which a shard begins
    first_column: int = 0  # the table's column at which a shard begins
    id_range: IdRange | None = None  # the range that all of its ids are declared to be in
    dedup: Dedup = WHERE_IT_PAYS  # what the user says about sending each of its different ids once, if it is sharded

    def __repr__(self) -> str:
        """One line of what decides most; the fields have the rest."""
        features = ", ".join(self.feature_names)
        return f"TableSpec({self.name!r}, features={features}, pooling={self.pooling}, {self.in_short})"

    @property
    def in_short(self) -> str:
        """``1,000 x 16, raw ids``: rows and columns, and which ids have an index."""
        size = f"{self.num_embeddings:,} x {self.embedding_dim}"
        if self.hashing is None or not self.hashing.has_index:
            return size
        dense = self.hashing.dense_rows
        ids = f"raw ids beyond {dense:,} rows" if dense else "raw ids"
        return f"{size}, {ids}" + (f", on_full={self.hashing.on_full!r}" if self.hashing.on_full != "error" else "")

    @property
    def table_name(self) -> str:
        return self.shard_of or self.name

    @property
    def is_pooled(self) -> bool:
        return self.pooling != "NONE"

    @property
    def output_keys(self) -> tuple[str, ...]:
        """The keys of the output that its columns belong to."""
        return self.shard_keys or self.embedding_names

    @property
    def has_index(self) -> bool:
        return self.hashing is not None and self.hashing.has_index

    @property
    def never_needs_index(self) -> bool:
        """Whether all of its ids are declared to be below ``dense_rows``: they are rows, though it has an index."""
        if self.id_range is None or self.hashing is None or not self.has_index or self.shard_of:
            return False
        counts = self.evicts or self.admits  # then the index keeps an account of all ids
        return not counts and self.id_range.lower >= 0 and self.id_range.upper < self.hashing.dense_rows

    @property
    def row_limit(self) -> int:
        """The number of rows that its ids must be below; -1 if an index takes any id."""
        if self.never_needs_index and self.hashing is not None:
            return self.hashing.dense_rows
        return -1 if self.has_index else self.num_embeddings

    @property
    def evicts(self) -> bool:
        return self.has_index and self.hashing is not None and self.hashing.evicts

    @cached_property
    def sends_different(self) -> bool:
        """Whether its ids are sent to other ranks once per key and batch, if it is sharded."""
        return self.why_sent_as_they_come is None

    @cached_property
    def why_sent_as_they_come(self) -> Diagnostic | None:
        """Why equal ids are sent as often as they come; None if they are not."""
        is_counted = self.evicts or self.admits
        return why_not(self.dedup, self.name, self.embedding_dim, is_pooled=self.is_pooled, is_counted=is_counted)

    @cached_property
    def sent_lengths(self) -> tuple[str, ...]:
        """For each of its features, the name of the length that says how many of its ids are sent."""
        return tuple(map(different, self.feature_names)) if self.sends_different else self.feature_names

    @property
    def admits(self) -> bool:
        return self.has_index and self.hashing is not None and self.hashing.admits


def embedding_names(tables: tuple[TableSpec, ...]) -> list[str]:
    """The output keys of ``tables``, in order."""
    return [name for table in tables for name in table.embedding_names]


def embedding_dims(tables: tuple[TableSpec, ...]) -> list[int]:
    """The number of columns of each output key of ``tables``, in order."""
    return [table.embedding_dim for table in tables for _ in table.embedding_names]


def output_dtype(tables: Iterable[TableSpec]) -> torch.dtype:
    """The dtype of a tensor that has the columns of all ``tables``; float32 if there are no tables."""
    dtypes = {table.output_dtype for table in tables}
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32


class Columns(NamedTuple):
    """Adjacent columns of one output key."""

    key: str  # the key, ``feature`` or ``feature@table``
    first: int  # the first of these columns within the key
    dim: int
    dtype: torch.dtype = torch.float32  # the dtype of pooled values


def columns_of(tables: tuple[TableSpec, ...]) -> list[Columns]:
    """The columns of output keys that lookups of ``tables`` (or of shards of tables) produce, in order."""
    return [
        Columns(key, table.first_column, table.embedding_dim, table.output_dtype)
        for table in tables
        for key in table.output_keys
    ]


def total_dim(columns: Iterable[Columns]) -> int:
    """The number of columns of a tensor that holds ``columns``."""
    return sum(part.dim for part in columns)


def total_bytes(columns: Iterable[Columns]) -> int:
    """The bytes of one row of a tensor that holds ``columns``."""
    return sum(part.dim * part.dtype.itemsize for part in columns)


@dataclass(frozen=True)
class Shard:
    """A rectangle of one table on one rank."""

    table: TableSpec
    rank: int  # the rank that holds it; a replicated table has one shard per rank
    rows: tuple[int, int]  # the first row and the row after the last
    columns: tuple[int, int]  # the first column and the column after the last
    # the number of the piece, if the rows of these columns are cut into pieces; otherwise -1. It decides how ids
    # are routed: a shard without a number gets all ids of its features, and a numbered shard gets those of its
    # rows.
    piece: int = -1
    # the name of the shard on its rank: the table's, with a number if the rank has several of its shards
    name: str = ""

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def is_empty(self) -> bool:
        """Whether it has no rows. An empty shard appears only in the metadata of checkpoints."""
        return self.num_rows == 0

    @cached_property
    def output_columns(self) -> list[Columns]:
        """The columns of the table's output keys that it holds."""
        first, dim, dtype = self.columns[0], self.num_columns, self.table.output_dtype
        return [Columns(key, first, dim, dtype) for key in self.table.embedding_names]

    @property
    def keys(self) -> tuple[str, ...]:
        """Its keys among those that are sent."""
        return tuple(f"{name}{self.name.removeprefix(self.table.name)}" for name in self.table.embedding_names)

    def expected_ids(self, length: Callable[[str], Any] = mean_length) -> Any:
        """How many ids a sample sends to it, if all rows are equally likely and lengths are such: an expression, or a
        number if ``length`` gives numbers.
        """
        share = Fraction(self.num_rows, self.table.num_embeddings)
        return sum(share * length(name) for name in self.table.sent_lengths)

    def of(self, whole: Tensor) -> Tensor:
        """A view of this rectangle in the ``[rows, dim]`` tensor of the whole table."""
        return whole[slice(*self.rows), slice(*self.columns)]

    @cached_property
    def spec(self) -> TableSpec:
        """The shard as a table of its rank. What is pooled are sums; ``mean_divide`` divides them at the end."""
        return replace(
            self.table, name=self.name, embedding_names=self.keys, num_embeddings=self.num_rows,
            embedding_dim=self.num_columns, pooling="SUM" if self.table.is_pooled else self.table.pooling,
            shard_of=self.table.name, shard_keys=self.table.embedding_names, first_row=self.rows[0],
            first_column=self.columns[0], dedup=Dedup(self.table.sends_different),
        )  # fmt: skip


def name_shards(shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """Name the shards of one table: if a rank has several, the second is ``<table>@1`` and so on."""
    seen: dict[int, int] = {}
    named = []
    for shard in shards:
        number = seen[shard.rank] = seen.get(shard.rank, -1) + (not shard.is_empty)
        named.append(replace(shard, name=f"{shard.table.name}@{number}" if number > 0 else shard.table.name))
    return tuple(named)
