"""The names of index tensors in a checkpoint: which a table must have, which it may have, and which have no index."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from recfx.checkpoint.names import mismatch
from recfx.checkpoint.sharded_names import sharded_tables
from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import collections_by_prefix
from recfx.collections.kinds import KINDS
from recfx.errors import CheckpointError
from recfx.hashing.identity import IDENTITY
from recfx.hashing.row_move import saved_names
from recfx.hashing.state import EVERY_NAME

_NEEDED = ("row_ids", "row_state", IDENTITY)
_READ_ANYWAY = 1 << 20  # small enough to read, so that the error says exactly what is wrong
_OPTIONAL = tuple(name for name in EVERY_NAME if name not in _NEEDED)


def table_prefixes(model: nn.Module) -> dict[tuple[str, str], set[str]]:
    """The keys of every index that is not sharded, by prefix of its collection and name of its table."""
    return {
        (prefix, table): {f"{prefix}hash_indexes.{table}.{name}" for name in saved_names(collection.index(table))}
        for prefix, collection in collections_by_prefix(model, UnshardedCollection)
        for table in collection.hash_indexes
    }


def sharded_table_prefixes(model: nn.Module) -> dict[tuple[str, str], set[str]]:
    """The keys of every sharded index, likewise."""
    return {
        (table.prefix, table.name): set(table.index_keys().values())
        for table in sharded_tables(model)
        if table.table.table.has_index
    }


def optional_keys(tables: Collection[tuple[str, str]]) -> set[str]:
    """The keys that only some policies need: an index loads without them, as ``state.buffers_from_state`` says."""
    return {f"{prefix}hash_indexes.{table}.{name}" for prefix, table in tables for name in _OPTIONAL}


def without_unused(tables: Mapping[tuple[str, str], set[str]], saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was saved, without the keys that the indexes here do not use."""
    unused = optional_keys(tables).difference(*tables.values())
    return {name: tensor for name, tensor in saved.items() if name not in unused}


def check_same_tables_have_indexes(
    tables: Collection[tuple[str, str]], state: Collection[str], saved: Collection[str]
) -> None:
    """Refuse tables that have an index on one side only: without it, the rows of ids mean nothing.

    Args:
        tables: the tables of this model that have an index.
        state: names in this model.
        saved: names in the checkpoint.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    with_index = dict.fromkeys(found for found in map(_table_of, saved) if found is not None)
    for prefix, table in tables:
        if (prefix, table) not in with_index and _has_weight(saved, prefix, table):
            raise mismatch(
                f"table {table!r} was saved without an index, but has one here.",
                module_path=prefix.rstrip("."),
                what_to_do="convert with hashing=HashConfig() as when saving, or load the plain state with "
                "load_state_dict, which empties the index.",
            )
    for prefix, table in with_index:
        if (prefix, table) not in tables and _has_weight(state, prefix, table):
            raise mismatch(
                f"the checkpoint has an index for table {table!r}, which has no index here.",
                module_path=prefix.rstrip("."),
                what_to_do="convert with hashing=HashConfig(dense_rows=0, ...) as when saving.",
            )


def check_index_sizes(saved: Mapping[str, Tensor], keys: Collection[str], rows: int, table: str) -> None:
    """Refuse tensors that are far larger than an index can be before they are read, because memory might not suffice.

    Args:
        saved: shapes and dtypes, by name in the model.
        keys: the keys of one index.
        rows: number of rows of its table.
        table: name of the table.

    Raises:
        CheckpointError: ``rows_mismatch``.
    """
    for key in sorted(keys):
        if key in saved and saved[key].numel() > max(rows, _READ_ANYWAY):
            raise CheckpointError(
                f"{key} was saved with {saved[key].numel()} numbers, but the table has {rows} rows here.",
                reason="rows_mismatch",
                module_path=table,
                what_to_do="Build the table with as many rows as when saving; if it was, the checkpoint is damaged.",
            )


def _table_of(name: str) -> tuple[str, str] | None:
    """Prefix of the collection and name of the table whose index has the key ``name``; None if it is not such a key.

    The time grows only with the length of the name, even if the name was chosen maliciously.
    """
    *prefix, indexes, table, buffer = ["", "", *name.rsplit(".", 3)]
    if indexes != "hash_indexes" or buffer not in EVERY_NAME:
        return None
    return f"{prefix[-1]}." * bool(prefix[-1]), table


def _has_weight(names: Collection[str], prefix: str, table: str) -> bool:
    """Whether the table is among these names, in a collection of any kind."""
    return any(prefix + kind.weight_name("", table) in names for kind in KINDS)
