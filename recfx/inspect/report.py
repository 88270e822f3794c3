"""What ``recfx.explain`` returns: the report, and how it is shown as text, HTML and JSON.

All that it says is rows of tables: text and HTML show the same ones, text the first of many.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from recfx.collections.kinds import table_in
from recfx.errors import Diagnostic, Severity, few, plural, printable
from recfx.errors.grid import Grid, groups_of, size
from recfx.errors.shown import escape, fragment, heading, html_table, page, plain_text, pre, rich_table
from recfx.inspect.report_data import (
    CollectionReport,
    HashingReport,
    NodeReport,
    ShardingReport,
    ShardReport,
    TableReport,
    Verification,
    name_of,
    place_of,
    shape_text,
)
from recfx.planner.pricing.work import expression

REPORT_VERSION = "4"

_WIDTH, _MOST_ROWS, _MOST_MESSAGES = 120, 20, 2
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
_FOLDED = ("Shards", "Nodes")
FILLING = ("table_full", "index_nearly_full", "shared_answers", "eviction_churn")
"""The reasons of tables that are, or soon will be, too small."""

_STATUS_ORDER = ("converted", "convertible", "kept", "refused")
_LEGEND = "B: batch size; W: ranks; L_f: mean number of ids of feature f per sample"
_HOW_FOUND = "traced: a call of it was seen; walked: calls not traced"
_DENSE = "weight.grad: backward writes a gradient as large as the table, for an optimizer that you step"


@dataclass(frozen=True, repr=False)
class Report:
    """What was done to a model, or would be done. ``str()`` is plain text.

    A terminal's ``rich.console.Console`` prints it in colours, and as wide as the terminal is. Notebooks show it as
    HTML. Text shows the first of many rows, and HTML and JSON show all.

    Example:
        >>> report = recfx.explain(Model())
        >>> report.ok, [collection.path for collection in report.collections]
        (True, ['ebc'])
        >>> print(report)
        1 collection: 1 convertible. OK
        ...
    """

    version: str  # of this schema; it changes when a field changes its meaning or is removed
    recfx_version: str  # that made the report; the next two are those that it ran under
    torch_version: str
    torchrec_version: str
    ok: bool  # False if a reason is an error: something is refused, there is no collection, or verification failed
    collections: tuple[CollectionReport, ...]  # every collection, converted or not, in the order of the model
    reasons: tuple[Diagnostic, ...]  # everything worth knowing, errors first
    verification: Verification  # what ``convert`` compared

    def __str__(self) -> str:
        return plain_text(self._text(_WIDTH))

    def __repr__(self) -> str:
        return f"Report({self._headline})"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._text(options.max_width)

    def to_json(self) -> str:
        """The whole report; keys are the names of fields, and symbolic sizes are text.

        Example:
            >>> import json
            >>> json.loads(recfx.explain(Model()).to_json())["ok"]
            True
        """
        return json.dumps(asdict(self), indent=2, default=str)

    def to_html(self) -> str:
        """A single page that needs no other file.

        Example:
            >>> with open("report.html", "w", encoding="utf-8") as file:
            ...     size = file.write(recfx.explain(Model()).to_html())
        """
        about = f"<p>{escape(self._versions)}, report version {escape(self.version)}</p>"
        return page(self._headline, "ok" if self.ok else "error", [about, *self._parts()])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return fragment([heading(self._headline, "ok" if self.ok else "error"), *self._parts()])

    @property
    def _headline(self) -> str:
        """``2 collections: 1 converted, 1 refused. NOT OK``, and which tables have stopped training."""
        counts = Counter(collection.status for collection in self.collections)
        parts = ", ".join(f"{counts[status]} {status}" for status in _STATUS_ORDER if counts[status])
        counted = plural(len(self.collections), "collection") if self.collections else "no collections"
        full = [table_in(reason.path)[1] for reason in self.reasons if reason.code == "table_full"]
        then = f": {few(full, 3)}: training has stopped, for want of rows" if full else ""
        return f"{counted}{': ' if parts else ''}{parts}. {'OK' if self.ok else 'NOT OK'}{then}"

    @property
    def _versions(self) -> str:
        return f"recfx {self.recfx_version}, torch {self.torch_version}, torchrec {self.torchrec_version}"

    def _text(self, width: int) -> Iterator[RenderableType]:
        """What matters first, and of many rows the first; prose is wrapped at ``width``."""
        yield Text(self._headline, style="bold green" if self.ok else "bold red")
        yield Text(self._versions)
        verification = self.verification.text.removeprefix("verification: ")
        yield Text(f"verification: {verification if self.verification.ok is False else verification.splitlines()[0]}")
        codes = groups_of(reason_rows(self.reasons), lambda row: (row.reason.severity, row.reason.code))
        for rows in codes:
            if rows[0].reason.severity != Severity.INFO:
                yield from _reason(rows, width)
        for grid in sections(self.collections):
            yield Text(f"\n{grid.title}", style="bold")
            yield rich_table(grid, _MOST_ROWS)
            if len(grid.rows) > _MOST_ROWS:
                yield Text(f"... and {len(grid.rows) - _MOST_ROWS:,} more (to_html() has all)")
            if grid.more:
                yield Text(grid.more)
        for rows in codes:
            if rows[0].reason.severity == Severity.INFO:
                yield from _reason(rows, width)

    def _parts(self) -> Iterator[str]:
        """The reasons and the tables in HTML."""
        rows = reason_rows(self.reasons)
        matter = [row for row in rows if row.reason.severity != Severity.INFO]
        notes = [row for row in rows if row.reason.severity == Severity.INFO]
        for title, some in (("Refusals and warnings", matter), ("Notes", notes)):
            if some:
                yield f"<h2>{title}</h2>"
                yield from html_table(Grid.of(title, some, _REASONS))
        yield f"<h2>Verification</h2>{pre(self.verification.text)}"
        for grid in sections(self.collections):
            if grid.title.startswith(_FOLDED):
                yield f"<details><summary>{escape(grid.title)}</summary>{''.join(html_table(grid))}</details>"
            else:
                yield from (f"<h2>{escape(grid.title)}</h2>", *html_table(grid))


def _reason(rows: list[ReasonRow], width: int) -> Iterator[Text]:
    """One line that says what it is and for what it holds, then what it means."""
    first = rows[0].reason
    code = f"{first.severity}: {first.code}"
    head = Text(f"\n{code}: {holds_for([path for row in rows for path in row.paths])}")
    head.highlight_words([code], style=_STYLES[first.severity])
    yield head
    for row in rows[:_MOST_MESSAGES]:
        yield _prose(f"{holds_for(row.paths)}: " * (len(rows) > 1) + row.reason.message, width)
        if row.reason.what_to_do:
            yield _prose(f"What to do: {row.reason.what_to_do}", width)
    if len(rows) > _MOST_MESSAGES:
        yield _prose(f"... and {len(rows) - _MOST_MESSAGES:,} more (to_html() has all)", width)


def _prose(text: str, width: int) -> Text:
    return Text(textwrap.fill(printable(text), width, initial_indent="    ", subsequent_indent="    "))


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
_REASONS: dict[str, Callable[[ReasonRow], str]] = {
    "severity": lambda row: row.reason.severity,
    "code": lambda row: row.reason.code,
    "holds for": lambda row: holds_for(row.paths),
    "message": lambda row: row.reason.message,
    "what to do": lambda row: row.reason.what_to_do,
}
