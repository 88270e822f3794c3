"""What a report says, as rows: text and HTML show the same ones, text the first of many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from recfx.collections.kinds import table_in
from recfx.errors import Diagnostic, few, plural
from recfx.inspect.report_data import (
    CollectionReport,
    HashingReport,
    NodeReport,
    ShardingReport,
    ShardReport,
    TableReport,
    name_of,
    place_of,
    shape_text,
)
from recfx.planner.pricing.cost_text import expression
from recfx.printing.grid import Grid, groups_of, size

FILLING = ("table_full", "index_nearly_full", "shared_answers", "eviction_churn", "candidates_dropped")
"""The reasons of tables that are, or soon will be, too small."""

_STATUS_ORDER = ("converted", "convertible", "kept", "refused")
_LEGEND = "B: batch size; W: ranks; L_f: mean number of ids of feature f per sample"
_HOW_FOUND = "traced: a call of it was seen; walked: calls not traced"
_DENSE = "weight.grad: backward writes a gradient as large as the table, for an optimizer that you step"


def headline(collections: Sequence[CollectionReport], reasons: Sequence[Diagnostic], ok: bool) -> str:
    """One line: ``2 collections: 1 converted, 1 refused. NOT OK``, and which tables have stopped training."""
    counts = Counter(collection.status for collection in collections)
    parts = ", ".join(f"{counts[status]} {status}" for status in _STATUS_ORDER if counts[status])
    counted = plural(len(collections), "collection") if collections else "no collections"
    full = [table_in(reason.path)[1] for reason in reasons if reason.code == "table_full"]
    then = f": {few(full, 3)}: training has stopped, for want of rows" if full else ""
    return f"{counted}{': ' if parts else ''}{parts}. {'OK' if ok else 'NOT OK'}{then}"


class ReasonRow(NamedTuple):
    """A reason, and the modules or tables for which it says the same."""

    reason: Diagnostic
    paths: tuple[str, ...]


def reason_rows(reasons: Sequence[Diagnostic]) -> list[ReasonRow]:
    """The worst first, those of a code together; among equals, tables that fill up come first."""
    ordered = sorted(reasons, key=lambda reason: (reason.severity.rank, reason.code not in FILLING))
    return [
        ReasonRow(same[0], tuple(dict.fromkeys(reason.path for reason in same)))
        for of_code in groups_of(ordered, lambda reason: (reason.severity, reason.code))
        for same in groups_of(of_code, lambda reason: (reason.message, reason.what_to_do))
    ]


def holds_for(paths: Sequence[str]) -> str:
    """``ebc.embedding_bags.t``, or ``26 tables of sparse_arch.ebc: table_0..25``."""
    if len(paths) == 1:
        return name_of(paths[0])
    owners, tables = zip(*map(table_in, paths), strict=True)
    if not all(tables) or len(set(owners)) > 1:
        return f"{len(paths):,} modules: {few(list(map(name_of, paths)), 4)}"
    return f"{len(paths):,} tables of {name_of(owners[0])}: {few(tables, 4)}"


def reason_grid(rows: Sequence[ReasonRow]) -> Grid:
    """One row per reason."""
    columns: dict[str, Callable[[ReasonRow], str]] = {
        "severity": lambda row: row.reason.severity,
        "code": lambda row: row.reason.code,
        "holds for": lambda row: holds_for(row.paths),
        "message": lambda row: row.reason.message,
        "what to do": lambda row: row.reason.what_to_do,
    }
    return Grid.of("Reasons", rows, columns)


class _Table(NamedTuple):
    collection: CollectionReport
    table: TableReport
    hashing: HashingReport

    @property
    def sharding(self) -> ShardingReport:
        assert self.table.sharding is not None
        return self.table.sharding


def sections(collections: Sequence[CollectionReport]) -> list[Grid]:
    """The indexes that have counted something, all collections, tables, shards and nodes."""
    tables = [_Table(one, table, table.hashing or HashingReport("")) for one in collections for table in one.tables]
    indexes = [item for item in tables if any(item.hashing.counters.values())]
    indexes.sort(key=lambda item: item.hashing.worst_bucket_occupancy or 0.0, reverse=True)
    sharded = [item for item in tables if item.table.sharding is not None]
    nodes = [node for collection in collections for node in collection.nodes]
    dense = _DENSE if any(item.table.has_dense_gradient for item in tables) else ""
    devices = ", ".join(sorted({item.table.device for item in tables} - {""}))
    total = f"{plural(len(tables), 'table')}, {size(sum(item.table.bytes for item in tables))}"
    seen_by = [f"rank {item.sharding.rank} of {item.sharding.world_size}" for item in sharded[:1]]
    grids = [
        Grid.of("Indexes, the fullest first", indexes, _INDEXES, [*_INDEXES][2:]),
        Grid.of("Collections", collections, _COLLECTIONS, ("tables", "size"), _HOW_FOUND),
        Grid.of(f"Tables: {total}{' on ' * bool(devices)}{devices}", tables, _TABLES, ("rows", "dim", "size"), dense),
        Grid.of(f"Shards: sharding, as {''.join(seen_by)} sees it", sharded, _SHARDING, [*_SHARDING][4:7]),
        Grid.of("Nodes", nodes, _NODES, more=_LEGEND),
    ]
    return [grid for grid in grids if grid.rows]


def _hashing(table: TableReport) -> str:
    """``index, evict lru, admit after 3, unseen share``: the mode, and what differs from the defaults."""
    report = table.hashing
    if report is None or report.mode != "index":
        return "" if report is None else report.mode
    parts = ["index"]
    parts += [f"ids below {report.dense_rows:,} dense"] if report.dense_rows else []
    parts += [] if report.on_full == "error" else [f"{report.on_full} {report.evict}".rstrip()]
    parts += [f"after {report.ttl_batches:,} batches"] if report.ttl_batches else []
    parts += [f"admit after {report.admit_after}"] if (report.admit_after or 1) > 1 else []
    parts += [] if report.unseen == "zeros" else [f"unseen {report.unseen}"]
    return ", ".join(parts)


def _shards(item: _Table) -> str:
    """``0: all``, or ``1: rows 10-19, columns 0-3``; a dimension that is not cut is left out."""
    if item.sharding.is_replicated:
        return "every rank"
    return few([_shard(item.table, shard) for shard in item.sharding.shards], 64)


def _shard(table: TableReport, shard: ShardReport) -> str:
    (first, end), (left, right) = shard.rows, shard.columns
    if first == end:
        return f"{shard.rank}: nothing"
    parts = [] if right - left == table.dim else [f"columns {left}-{right - 1}"]
    parts += [] if end - first == table.rows else [f"rows {first:,}-{end - 1:,}"]
    return f"{shard.rank}: {' of '.join(parts) or 'all'}"


def _number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _counted(counter: str) -> Callable[[_Table], str]:
    """A column that is left out if nothing was counted in any table."""
    return lambda item: _number(item.hashing.counters.get(counter) or None)


_INDEXES: dict[str, Callable[[_Table], str]] = {
    "table": lambda item: item.table.name,
    "collection": lambda item: name_of(item.collection.path),
    "ids held": lambda item: _number(item.hashing.ids_held),
    "full": lambda item: f"{item.hashing.occupancy or 0:.1%}",
    "worst bucket": lambda item: f"{item.hashing.worst_bucket_occupancy or 0:.1%}",
    "seen": _counted("ids_seen"),
    "evicted": _counted("evicted"),
    "shared": _counted("shared_answers"),
    "unseen": _counted("unseen_answers"),
    "waiting": lambda item: _number(item.hashing.candidates),
    "probe": lambda item: _number(item.hashing.longest_probe),
    "bytes/row": lambda item: f"{(item.hashing.index_bytes or 0) / (item.hashing.rows_here or 1):.1f}",
}
_COLLECTIONS: dict[str, Callable[[CollectionReport], str]] = {
    "collection": lambda collection: " = ".join(map(name_of, collection.paths)),
    "class": lambda collection: collection.kind,
    "status": lambda collection: ": ".join(filter(None, (collection.status, collection.reason))),
    "found": lambda collection: collection.found,
    "tables": lambda collection: f"{len(collection.tables):,}",
    "size": lambda collection: size(sum(table.bytes for table in collection.tables)),
    "where": lambda collection: place_of(collection.file, collection.line) if collection.file else "",
}
_TABLES: dict[str, Callable[[_Table], str]] = {
    "table": lambda item: item.table.name,
    "collection": lambda item: name_of(item.collection.path),
    "features": lambda item: few(item.table.features, 2),
    "rows": lambda item: f"{item.table.rows:,}",
    "dim": lambda item: str(item.table.dim),
    "pooling": lambda item: item.table.pooling,
    "type": lambda item: item.table.dtype,
    "size": lambda item: size(item.table.bytes),
    "hashing": lambda item: _hashing(item.table),
    "kernel": lambda item: item.table.kernel,
    "optimizer": lambda item: "weight.grad" if item.table.has_dense_gradient else item.table.optimizer,
}
_SHARDING: dict[str, Callable[[_Table], str]] = {
    "table": lambda item: item.table.name,
    "sharding": lambda item: item.sharding.sharding_type,
    "compute kernel": lambda item: item.sharding.compute_kernel,
    "pooled rows": lambda item: item.sharding.travels,
    "rows here": lambda item: f"{item.sharding.rows_here:,}",
    "columns here": lambda item: f"{item.sharding.columns_here:,}",
    "size here": lambda item: size(item.sharding.bytes_here),
    "shards": _shards,
}
_NODES: dict[str, Callable[[NodeReport], str]] = {
    "node": lambda node: node.name,
    "shape": lambda node: shape_text(node.shape),
    "bytes": lambda node: expression(node.bytes),
    "type": lambda node: node.dtype,
    "device": lambda node: node.device,
    "kernel": lambda node: node.kernel,
    "made by": lambda node: node.made_by,
}
