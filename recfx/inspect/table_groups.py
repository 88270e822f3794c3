"""The tables of a report: one line per group of like tables, or one line each."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from recfx.inspect import wording
from recfx.inspect.collection_report import CollectionReport
from recfx.inspect.collection_rows import FEW, totals
from recfx.inspect.grid import LISTS_EACH, Grid
from recfx.inspect.names import few, groups_of, plural, runs_of
from recfx.inspect.sharding_columns import SHARDING_COLUMNS, sharding_row, sharding_title
from recfx.inspect.table_report import TableReport

_COLUMNS = (
    "table", "collection", "features", "rows", "dim", "pooling", "type", "size", "hashing", "ids held", "kernel",
    "optimizer",
)  # fmt: skip
_NUMBERS = frozenset(("rows", "dim", "size"))
_USUAL_TYPE = "float32"  # groups of such tables need no column for it


@dataclass(frozen=True)
class TableOf:
    """A table, and the collection that it is in."""

    collection: CollectionReport
    table: TableReport


def tables_of(collections: Iterable[CollectionReport]) -> list[TableOf]:
    """All tables, in the order of the model."""
    return [TableOf(collection, table) for collection in collections for table in collection.tables]


def tables_grid(tables: list[TableOf], every: bool = False) -> Grid:
    """All tables.

    Args:
        tables: those of the report.
        every: a line for each, however many there are.
    """
    single = every or len(tables) <= FEW
    groups = [[one] for one in tables] if single else groups_of(tables, _key)
    title = f"Tables: {totals(one.table for one in tables)}"
    if len(groups) < len(tables):
        title += f", in {plural(len(groups), 'group')} of like ones ({LISTS_EACH})"
    several = len({one.collection.paths for one in tables}) > 1
    usual_type = not single and all(one.table.dtype == _USUAL_TYPE for one in tables)
    rows = tuple(_row(group, several, single, usual_type) for group in groups)
    return Grid(title, _COLUMNS, rows, _NUMBERS).without_empty_columns()


def sharding_grid(tables: list[TableOf], every: bool = False) -> Grid | None:
    """Where the parts of sharded tables are; None if no table is sharded."""
    sharded = [one.table for one in tables if one.table.sharding is not None]
    if not sharded:
        return None
    single = every or len(sharded) <= FEW
    groups = [[one] for one in sharded] if single else groups_of(sharded, _sharding_key)
    rows = tuple(sharding_row(group[0]) if len(group) == 1 else _sharding_group(group) for group in groups)
    return Grid(
        f"Where they are: {sharding_title(sharded)}; {_weights_by_rank(sharded)}",
        SHARDING_COLUMNS,
        rows,
        frozenset(SHARDING_COLUMNS[-3:]),
    )


def names_of(tables: list[TableReport]) -> str:
    """``table_0``, ``26: table_0..25``, or ``500 like table_0``."""
    runs = runs_of([table.name for table in tables])
    if len(tables) == 1:
        return tables[0].name
    return f"{len(tables):,}: {runs[0][0]}" if len(runs) == 1 else f"{len(tables):,} like {tables[0].name}"


def _row(group: list[TableOf], several_collections: bool, with_features: bool, usual_type: bool) -> tuple[str, ...]:
    first, tables = group[0].table, [one.table for one in group]
    owners = list(dict.fromkeys(wording.name_of(one.collection.path) for one in group))
    return (
        names_of(tables),
        "" if not several_collections else few(owners, 1),
        wording.listed(first.features, 2) if with_features else "",
        wording.between([table.rows for table in tables]),
        str(first.dim),
        first.pooling,
        "" if usual_type else first.dtype,
        wording.size(sum(table.bytes for table in tables)),
        wording.rules(first.hashing),
        wording.held(tables),
        first.kernel,
        wording.optimizer(first),
    )


def _key(one: TableOf) -> Hashable:
    """What like tables have in common; how they are sharded is in a table of its own."""
    table = one.table
    return (
        table.dim, table.pooling, table.dtype, table.device, wording.rules(table.hashing), table.kernel,
        table.optimizer, one.collection.status,
    )  # fmt: skip


def _sharding_key(table: TableReport) -> Hashable:
    found = table.sharding
    return None if found is None else (found.sharding_type, found.compute_kernel, found.bytes_here > 0)


def _sharding_group(tables: list[TableReport]) -> tuple[str, ...]:
    found = [table.sharding for table in tables if table.sharding is not None]
    ranks = sorted({shard.rank for one in found for shard in one.shards if shard.bytes})
    return (
        names_of(tables),
        found[0].sharding_type,
        found[0].compute_kernel,
        found[0].travels,
        "every rank" if found[0].is_replicated else f"ranks {few([str(rank) for rank in ranks], 4)}",
        wording.between([one.rows_here for one in found]),
        wording.between([one.columns_here for one in found]),
        wording.size(sum(one.bytes_here for one in found)),
    )


def _weights_by_rank(tables: list[TableReport]) -> str:
    """How evenly the weights lie on the ranks."""
    found = [table.sharding for table in tables if table.sharding is not None]
    sizes = dict.fromkeys(range(found[0].world_size), 0)
    for shard in (shard for one in found for shard in one.shards):
        sizes[shard.rank] = sizes.get(shard.rank, 0) + shard.bytes
    least, most = min(sizes.values()), max(sizes.values())
    if least == most:
        return f"{wording.size(most)} of weights on each rank"
    where = [str(rank) for rank, size in sizes.items() if size == most]
    return f"{wording.size(least)} to {wording.size(most)} of weights per rank, most on rank {few(where, 3)}"
