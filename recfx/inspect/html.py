"""The report as one HTML page: complete, without other files or scripts, and with everything from the model escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from recfx.diagnostics import Diagnostic
from recfx.inspect import wording
from recfx.inspect.collection_report import CollectionReport
from recfx.inspect.index_columns import INDEX_COLUMNS, has_index, index_row
from recfx.inspect.report_data import ReportData
from recfx.inspect.sharding_columns import SHARDING_COLUMNS, sharding_row, sharding_title
from recfx.inspect.table_report import TableReport

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 84em; padding: 0 1em; color: #1c1c1c; }
table { border-collapse: collapse; margin: .5em 0 1.5em; }
th, td { border: 1px solid #ccc; padding: .2em .6em; text-align: left; vertical-align: top; }
th { background: #f2f2f2; }
pre { background: #f7f7f7; overflow-x: auto; padding: .6em; }
.ok { color: #176b2c; } .error { color: #a51414; } .warning { color: #8a5a00; } .info { color: #444; }
"""

_COLLECTION_COLUMNS = ("collection", "class", "status", "reason", "message", "what to do", "found", "where")
_REASON_COLUMNS = ("severity", "code", "module", "message", "what to do")
_TABLE_COLUMNS = (
    "table", "features", "rows", "dim", "pooling", "type", "device", "size",
    "hashing", "kernel", "passed over", "optimizer", "reasons",
)  # fmt: skip
_FORECAST_COLUMNS = ("usable", "room", "batches until full", "suggested rows")
_NODE_COLUMNS = ("node", "kind", "shape", "bytes", "type", "device", "kernel", "made by")


def render_html(report: ReportData) -> str:
    """The whole page."""
    title = wording.headline(report)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f'<h1 class="{"ok" if report.ok else "error"}">{escape(title)}</h1>',
        f"<p>{escape(wording.versions(report))}, report version {escape(report.version)}</p>",
        f"<h2>Verification</h2><pre>{escape(report.verification.text)}</pre>",
        "<h2>Collections</h2>",
        _table(_COLLECTION_COLUMNS, (_collection_row(collection) for collection in report.collections)),
    ]
    if report.reasons:
        parts += ["<h2>Reasons</h2>", _reasons(report.reasons)]
    for collection in report.collections:
        parts += _details(collection)
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _collection_row(one: CollectionReport) -> tuple[str, ...]:
    paths = " = ".join(wording.name_of(path) for path in one.paths)
    where = f"{one.file}:{one.line}" if one.file else ""
    return paths, one.kind, one.status, one.reason, one.message, one.what_to_do, one.found, where


def _reasons(reasons: tuple[Diagnostic, ...]) -> str:
    rows = []
    for one in reasons:
        cells = (one.severity, one.code, wording.name_of(one.path), one.message, one.what_to_do)
        rows.append(f'<tr class="{escape(one.severity)}">{_cells(cells)}</tr>')
    return _frame(_REASON_COLUMNS, rows)


def _details(collection: CollectionReport) -> list[str]:
    parts = [f"<h2>{escape(wording.name_of(collection.path))}</h2>"]
    if collection.tables:
        parts.append(_table(_TABLE_COLUMNS, _table_rows(collection)))
    if title := sharding_title(collection.tables):
        parts.append(f"<h3>{escape(title)}</h3>")
        sharded = [table for table in collection.tables if table.sharding is not None]
        parts.append(_table(SHARDING_COLUMNS, (sharding_row(table, most=64) for table in sharded)))
    if indexed := [table for table in collection.tables if has_index(table)]:
        columns = (*INDEX_COLUMNS, *_FORECAST_COLUMNS)
        parts.append(
            _table(columns, ((*index_row(table, "{:,}".format), *_forecast_cells(table)) for table in indexed))
        )
    if collection.nodes:
        rows = (
            (
                node.name, node.kind, wording.shape(node.shape), wording.expression(node.bytes),
                node.dtype, node.device, node.kernel, node.made_by,
            )
            for node in collection.nodes
        )  # fmt: skip
        parts.append(_table(_NODE_COLUMNS, rows))
    for one in collection.passes:
        changed = "" if one.modified else " (no change)"
        parts.append(
            f"<details><summary>graph after {escape(one.name)}{changed}</summary>"
            f"<pre>{escape(one.graph)}</pre></details>"
        )
    if collection.declined:
        found = [(one.by, one.code, one.message, one.node) for one in collection.declined]
        parts.append(f"<details><summary>declined: {len(found):,}</summary>")
        parts.append(_table(("by", "reason", "message", "node"), found) + "</details>")
    return parts


def _table_rows(collection: CollectionReport) -> Iterable[tuple[str, ...]]:
    for one in collection.tables:
        yield (
            one.name,
            ", ".join(one.features),
            f"{one.rows:,}",
            str(one.dim),
            one.pooling,
            one.dtype,
            one.device,
            wording.size(one.bytes),
            wording.hashing(one.hashing, wording.is_here(one)),
            one.kernel,
            " ".join(f"{declined.by}: {declined.message}" for declined in one.kernels_passed_over),
            one.optimizer,
            ", ".join(reason.code for reason in one.reasons),
        )


def _forecast_cells(table: TableReport) -> tuple[str, ...]:
    found = table.hashing
    assert found is not None
    numbers = (found.room, found.batches_until_full, found.suggested_rows)
    usable = "" if found.usable_share is None else wording.share(found.usable_share)
    return usable, *("" if number is None else f"{number:,}" for number in numbers)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return _frame(columns, [f"<tr>{_cells(row)}</tr>" for row in rows])


def _cells(cells: Iterable[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _frame(columns: tuple[str, ...], rows: list[str]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return "\n".join([f"<table><thead><tr>{head}</tr></thead><tbody>", *rows, "</tbody></table>"])
