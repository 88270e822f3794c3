"""The tables of a report, for text and HTML: what is listed, in which columns, and which like items share a line."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from recfx.errors import Diagnostic, few, plural, runs_of
from recfx.inspect import wording
from recfx.inspect.report_data import CollectionReport, NodeReport
from recfx.inspect.table_report import HashingReport, ShardingReport, ShardReport, TableReport
from recfx.printing.grid import Grid, groups_of, size

FEW = 12  # up to this many collections or tables have a line each
NEARLY_FULL = "index_nearly_full"
FILLING = ("table_full", NEARLY_FULL, "shared_answers", "eviction_churn", "candidates_dropped")
"""The reasons of tables that are, or soon will be, too small."""
LISTS_EACH = 'tables="all" lists each'
"""What a title or ``more`` says about what is left out; the page, which leaves nothing out, says something else."""
SPARE = (
    "found", "made by", "type", "pooled rows", "class", "pooling", "worst bucket", "unseen", "shared", "evicted",
    "seen", "columns here", "dim", "features", "rows here", "where", "bytes", "collection",
)  # fmt: skip
"""The columns that a narrow terminal leaves out, the first of them first."""
HOW_FOUND = "traced: a call of it was seen; walked: calls not traced"
LEGEND = "B: batch size; W: ranks; L_f: mean number of ids of feature f per sample"

_FULLEST, _MOST_NODES, _MOST_GRAPHS = 5, 24, 3
_USUAL_CLASS, _USUAL_TYPE = "EmbeddingBagCollection", "float32"  # where there is nothing else, no column says so


class TableOf(NamedTuple):
    """A table, and the collection that it is in."""

    collection: CollectionReport
    table: TableReport

    @property
    def hash_index(self) -> HashingReport:
        """The index of a table that has one with data."""
        assert self.table.index is not None
        return self.table.index


def overview(collections: tuple[CollectionReport, ...], every: bool = False) -> list[Grid]:
    """The indexes that fill up, then all collections, all tables, and where the parts of sharded tables are.

    Args:
        collections: the collections of the report.
        every: a line for each, however many there are.
    """
    tables = [TableOf(collection, table) for collection in collections for table in collection.tables]
    grids = [
        _filling(tables, every),
        _collections(collections, every) if collections else None,
        _tables(tables, every) if tables else None,
        _sharding([table for _, table in tables], every),
    ]
    return [grid for grid in grids if grid is not None]


def node_grids(collections: tuple[CollectionReport, ...], every: bool = False) -> tuple[list[Grid], str]:
    """The nodes of each kind of graph, and a line about those that are left out.

    Args:
        collections: the collections of the report.
        every: the nodes of each collection, however many there are.
    """
    described = [collection for collection in collections if collection.nodes]
    alike = groups_of(described, lambda report: tuple((node.kind, node.made_by, node.kernel) for node in report.nodes))
    groups = [[collection] for collection in described] if every else alike
    shown = groups if every else groups[:_MOST_GRAPHS]
    rest = sum(len(group) for group in groups[len(shown) :])
    more = f"... and {plural(rest, 'more collection')} with other nodes ({LISTS_EACH})" if rest else ""
    return [_nodes(group, every) for group in shown], more


def details(collection: CollectionReport) -> list[Grid]:
    """Everything about one collection: each of its tables, indexes and nodes by itself."""
    sharded = [table for table in collection.tables if table.sharding is not None]
    indexes = [TableOf(collection, table) for table in collection.tables if table.index is not None]
    grids = [
        Grid.of("", [collection], _COLLECTION_FACTS),
        Grid.of("", collection.tables, _TABLE_FACTS, ("rows", "dim", "size")),
        Grid.of(_sharding_title(sharded), [[table] for table in sharded], _sharding_columns(most=64)),
        Grid.of("", indexes, _INDEX_FACTS, list(_INDEX_FACTS)[1:]),
        Grid.of("", collection.nodes, _NODE_FACTS, more=LEGEND),
    ]
    return [grid for grid in grids if grid.rows]


def declined(collection: CollectionReport) -> Grid:
    """What passes and kernel targets did not do, and why."""
    columns: dict[str, Callable[[Diagnostic], str]] = {
        "by": lambda refusal: refusal.by,
        "reason": lambda refusal: refusal.code,
        "message": lambda refusal: refusal.message,
        "node": lambda refusal: refusal.node,
    }
    return Grid.of("", collection.declined, columns)


def totals(tables: Iterable[TableReport]) -> str:
    """``26 tables, 1.6 MiB on cpu``."""
    tables = tuple(tables)
    devices = sorted({table.device for table in tables if table.device})
    place = f" on {', '.join(devices)}" if devices else ""
    return f"{plural(len(tables), 'table')}, {_size(tables)}{place}"


# --- collections

_COLLECTION_FACTS: dict[str, Callable[[CollectionReport], str]] = {
    "class": lambda collection: collection.kind,
    "found": lambda collection: collection.found,
    "where": lambda collection: f"{collection.file}:{collection.line}" if collection.file else "unknown",
    "reason": lambda collection: collection.reason,
    "message": lambda collection: collection.message,
    "what to do": lambda collection: collection.what_to_do,
}


def _collections(collections: tuple[CollectionReport, ...], every: bool) -> Grid:
    alike = groups_of(collections, lambda report: (report.kind, report.status, report.reason, report.found))
    groups = [[collection] for collection in collections] if every or len(collections) <= FEW else alike
    usual = all(collection.kind == _USUAL_CLASS for collection in collections)
    columns: dict[str, Callable[[list[CollectionReport]], str]] = {
        "collection": _names_of_collections,
        "class": lambda group: "" if usual else group[0].kind,
        "status": lambda group: ": ".join(filter(None, (group[0].status, group[0].reason))),
        "found": lambda group: group[0].found,
        "tables": lambda group: f"{sum(len(collection.tables) for collection in group):,}",
        "size": lambda group: _size(table for collection in group for table in collection.tables),
        "where": _places,
    }
    return Grid.of("Collections", groups, columns, ("tables", "size"), HOW_FOUND)


def _names_of_collections(group: list[CollectionReport]) -> str:
    names = [" = ".join(map(wording.name_of, collection.paths)) for collection in group]
    return names[0] if len(group) == 1 else f"{len(group):,}: {few(names, 3)}"


def _places(group: list[CollectionReport]) -> str:
    places = list(dict.fromkeys(place for collection in group if (place := wording.place(collection))))
    return places[0] if len(places) == 1 else plural(len(places), "place") if places else ""


def _size(tables: Iterable[TableReport]) -> str:
    return size(sum(table.bytes for table in tables))


# --- tables

_TABLE_FACTS: dict[str, Callable[[TableReport], str]] = {
    "table": lambda table: table.name,
    "features": lambda table: ", ".join(table.features),
    "rows": lambda table: f"{table.rows:,}",
    "dim": lambda table: str(table.dim),
    "pooling": lambda table: table.pooling,
    "type": lambda table: table.dtype,
    "device": lambda table: table.device,
    "size": lambda table: size(table.bytes),
    "hashing": wording.hashing,
    "kernel": lambda table: table.kernel,
    "passed over": lambda table: " ".join(f"{refusal.by}: {refusal.message}" for refusal in table.kernels_passed_over),
    "optimizer": lambda table: table.optimizer,
    "reasons": lambda table: ", ".join(dict.fromkeys(reason.code for reason in table.reasons)),
}


def _tables(tables: list[TableOf], every: bool) -> Grid:
    single = every or len(tables) <= FEW
    groups = [[item] for item in tables] if single else groups_of(tables, _what_tables_share)
    title = f"Tables: {totals(table for _, table in tables)}"
    if len(groups) < len(tables):
        title += f", in {plural(len(groups), 'group')} of like ones ({LISTS_EACH})"
    several = len({collection.paths for collection, _ in tables}) > 1
    usual = not single and all(table.dtype == _USUAL_TYPE for _, table in tables)
    columns: dict[str, Callable[[list[TableOf]], str]] = {
        "table": lambda group: _names([table for _, table in group]),
        "collection": lambda group: few(_owners(group), 1) if several else "",
        "features": lambda group: wording.listed(group[0].table.features, 2) if single else "",
        "rows": lambda group: wording.between(table.rows for _, table in group),
        "dim": lambda group: str(group[0].table.dim),
        "pooling": lambda group: group[0].table.pooling,
        "type": lambda group: "" if usual else group[0].table.dtype,
        "size": lambda group: _size(table for _, table in group),
        "hashing": lambda group: wording.rules(group[0].table.hashing),
        "ids held": lambda group: wording.ids_held([table for _, table in group]),
        "kernel": lambda group: group[0].table.kernel,
        "optimizer": lambda group: _DENSE if group[0].table.has_dense_gradient else group[0].table.optimizer,
    }
    more = _DENSE_MEANS if any(table.has_dense_gradient for _, table in tables) else ""
    return Grid.of(title, groups, columns, ("rows", "dim", "size"), more)


_DENSE = "your own"
_DENSE_MEANS = (
    f"{_DENSE}: backward writes a gradient as large as the table (weight.grad), for an optimizer that you step"
)


def _what_tables_share(item: TableOf) -> Hashable:
    """What the tables of a group have in common; how they are sharded is in a table of its own."""
    table = item.table
    return (
        table.dim, table.pooling, table.dtype, table.device, wording.rules(table.hashing), table.kernel,
        table.optimizer, item.collection.status,
    )  # fmt: skip


def _names(tables: list[TableReport]) -> str:
    """``table_0``, ``26: table_0..25``, or ``500 like table_0``."""
    runs = runs_of([table.name for table in tables])
    if len(tables) == 1:
        return tables[0].name
    return f"{len(tables):,}: {runs[0][0]}" if len(runs) == 1 else f"{len(tables):,} like {tables[0].name}"


def _owners(group: list[TableOf]) -> list[str]:
    return list(dict.fromkeys(wording.name_of(collection.path) for collection, _ in group))


# --- indexes

_INDEX_FACTS: dict[str, Callable[[TableOf], str]] = {
    "table": lambda item: item.table.name,
    "batches": lambda item: f"{item.hash_index.count('batches'):,}",
    "ids seen": lambda item: f"{item.hash_index.count('ids_seen'):,}",
    "inserted": lambda item: f"{item.hash_index.count('inserted'):,}",
    "evicted": lambda item: f"{item.hash_index.count('evicted'):,}",
    "shared": lambda item: f"{item.hash_index.count('shared_answers'):,}",
    "unseen": lambda item: f"{item.hash_index.count('unseen_answers'):,}",
    "waiting": lambda item: _number(item.hash_index.candidates),
    "worst bucket": lambda item: _worst_bucket(item.hash_index),
    "probe": lambda item: str(item.hash_index.longest_probe),
    "bytes/row": lambda item: _bytes_per_row(item.hash_index),
    "room": lambda item: _number(item.hash_index.room),
    "batches until full": lambda item: _number(item.hash_index.batches_until_full),
}


def _filling(tables: list[TableOf], every: bool) -> Grid | None:
    """The indexes that have counted something or are too small, the fullest first; None if there are none."""
    counting = [
        item
        for item in tables
        if item.table.index is not None and (_fills(item) or any(count for _, count in item.hash_index.counters))
    ]
    if not counting:
        return None
    ordered = sorted(
        counting, key=lambda item: (_fills(item), item.hash_index.worst_bucket_occupancy or 0.0), reverse=True
    )
    fullest = min(max(sum(map(_fills, counting)), _FULLEST), FEW)
    shown = ordered if every or len(ordered) <= FEW else ordered[:fullest]
    several = len({collection.paths for collection, _ in tables}) > 1
    columns: dict[str, Callable[[TableOf], str]] = {
        "table": lambda item: item.table.name,
        "collection": lambda item: wording.name_of(item.collection.path) if several else "",
        "ids held": lambda item: wording.count(item.hash_index.ids_held or 0),
        "full": lambda item: wording.share(item.hash_index.occupancy or 0.0),
        "worst bucket": lambda item: _worst_bucket(item.hash_index),
        "fits": lambda item: (
            "" if item.hash_index.room is None or item.hash_index.evict else wording.count(item.hash_index.room)
        ),
        "full in": lambda item: _batches(item.hash_index.batches_until_full),
        "seen": lambda item: wording.count(item.hash_index.count("ids_seen")),
        "evicted": _count_of("evicted"),
        "shared": _count_of("shared_answers"),
        "unseen": _count_of("unseen_answers"),
        "waiting": lambda item: "" if item.hash_index.candidates is None else wording.count(item.hash_index.candidates),
        "probe": lambda item: str(item.hash_index.longest_probe) if every else "",
        "bytes/row": lambda item: _bytes_per_row(item.hash_index) if every else "",
    }
    numbers = [name for name in columns if name not in ("table", "collection", "worst bucket")]
    rest = len(ordered) - len(shown)
    more = f"... and {rest:,} more, none of them fuller ({LISTS_EACH})" if rest else ""
    return Grid.of(f"Indexes, the fullest first: {_what_happens(counting)}", shown, columns, numbers, more)


def _what_happens(counting: list[TableOf]) -> str:
    """What happens in how many of the tables: ``1 table is nearly full, 5 tables evict ids``. A table is full if one of
    its buckets is; one that has stopped training, which the headline names, is counted only there.
    """
    codes = [{reason.code for reason in item.table.reasons} for item in counting]
    filling = [item.hash_index for item, own in zip(counting, codes, strict=True) if NEARLY_FULL in own]
    full = sum(index.worst_bucket_occupancy == 1 for index in filling)
    counts = {
        ("has stopped training", "have stopped training"): sum("table_full" in own for own in codes),
        ("is full", "are full"): full,
        ("is nearly full", "are nearly full"): len(filling) - full,
        ("shares rows", "share rows"): sum("shared_answers" in own for own in codes),
        ("evicts ids", "evict ids"): sum(item.hash_index.count("evicted") > 0 for item in counting),
        ("forgets ids that wait", "forget ids that wait"): sum("candidates_dropped" in own for own in codes),
    }
    phrases = [f"{plural(count, 'table')} {words[count > 1]}" for words, count in counts.items() if count]
    forecasts = [batches for item in counting if (batches := item.hash_index.batches_until_full) is not None]
    soonest = f" yet; at this pace, the first is full in {_batches(min(forecasts))}" if forecasts else ""
    return ", ".join(phrases) or f"none needs more rows{soonest}"


def _fills(item: TableOf) -> bool:
    return any(reason.code in FILLING for reason in item.table.reasons)


def _number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _count_of(counter: str) -> Callable[[TableOf], str]:
    """A column that is left out if nothing was counted in any table."""
    return lambda item: wording.count(number) if (number := item.hash_index.count(counter)) else ""


def _batches(number: int | None) -> str:
    return "" if number is None else f"{wording.count(number)} {'batch' if number == 1 else 'batches'}"


def _bytes_per_row(index: HashingReport) -> str:
    return f"{(index.index_bytes or 0) / (index.rows_here or 1):.1f}"


def _worst_bucket(index: HashingReport) -> str:
    if index.worst_bucket is None:
        return ""
    return f"{index.worst_bucket}: {wording.share(index.worst_bucket_occupancy or 0.0)}"


# --- shards


def _sharding(tables: list[TableReport], every: bool) -> Grid | None:
    """Where the parts of sharded tables are; None if no table is sharded."""
    sharded = [table for table in tables if table.sharding is not None]
    if not sharded:
        return None
    groups = [[table] for table in sharded]
    if not every and len(sharded) > FEW:
        kinds = [(part.sharding_type, part.compute_kernel, part.bytes_here > 0) for part in _shardings(sharded)]
        alike = groups_of(zip(kinds, sharded, strict=True), lambda pair: pair[0])
        groups = [[table for _, table in group] for group in alike]
    title = f"Where they are: {_sharding_title(sharded)}; {_weights_by_rank(sharded)}"
    return Grid.of(title, groups, _sharding_columns(most=3), ("rows here", "columns here", "size here"))


def _sharding_columns(most: int) -> dict[str, Callable[[list[TableReport]], str]]:
    """The columns for groups of tables that are sharded alike; ``most`` shards of a single table are written out."""
    return {
        "table": _names,
        "sharding": lambda group: _shardings(group)[0].sharding_type,
        "compute kernel": lambda group: _shardings(group)[0].compute_kernel,
        "pooled rows": lambda group: _shardings(group)[0].travels,
        "where": lambda group: _where(group, most),
        "rows here": lambda group: wording.between(sharding.rows_here for sharding in _shardings(group)),
        "columns here": lambda group: wording.between(sharding.columns_here for sharding in _shardings(group)),
        "size here": lambda group: size(sum(sharding.bytes_here for sharding in _shardings(group))),
    }


def _shardings(tables: list[TableReport]) -> list[ShardingReport]:
    return [table.sharding for table in tables if table.sharding is not None]


def _sharding_title(tables: list[TableReport]) -> str:
    """Whose view this is; ``""`` without tables."""
    return "".join(
        f"sharding, as rank {sharding.rank} of {sharding.world_size} sees it" for sharding in _shardings(tables[:1])
    )


def _where(group: list[TableReport], most: int) -> str:
    shardings = _shardings(group)
    if shardings[0].is_replicated:
        return "every rank"
    if len(group) == 1:
        return wording.listed(tuple(_shard(group[0], shard) for shard in shardings[0].shards), most)
    ranks = sorted({shard.rank for sharding in shardings for shard in sharding.shards if shard.bytes})
    return f"rank{'s' if len(ranks) > 1 else ''} {few([str(rank) for rank in ranks], 4)}"


def _shard(table: TableReport, shard: ShardReport) -> str:
    """``1: rows 10-19, columns 0-3``; a dimension that is not cut is left out."""
    (first, end), (left, right) = shard.rows, shard.columns
    if first == end:
        return f"{shard.rank}: nothing"
    parts = [] if end - first == table.rows else [f"rows {first:,}-{end - 1:,}"]
    parts += [] if right - left == table.dim else [f"columns {left}-{right - 1}"]
    return f"{shard.rank}: {' of '.join(parts[::-1]) or 'all'}"


def _weights_by_rank(tables: list[TableReport]) -> str:
    """How evenly the weights lie on the ranks."""
    shardings = _shardings(tables)
    sizes = dict.fromkeys(range(shardings[0].world_size), 0)
    for shard in (shard for sharding in shardings for shard in sharding.shards):
        sizes[shard.rank] = sizes.get(shard.rank, 0) + shard.bytes
    least, most = min(sizes.values()), max(sizes.values())
    if least == most:
        return f"{size(most)} of weights on each rank"
    where = [str(rank) for rank, size in sizes.items() if size == most]
    return f"{size(least)} to {size(most)} of weights per rank, most on rank {few(where, 3)}"


# --- nodes

_NODE_FACTS: dict[str, Callable[[NodeReport], str]] = {
    "node": lambda node: node.name,
    "kind": lambda node: node.kind,
    "shape": lambda node: wording.shape(node.shape),
    "bytes": lambda node: wording.expression(node.bytes),
    "type": lambda node: node.dtype,
    "device": lambda node: node.device,
    "kernel": lambda node: node.kernel,
    "made by": lambda node: node.made_by,
}


def _nodes(group: list[CollectionReport], every: bool) -> Grid:
    first = group[0]
    nodes = first.nodes if every else first.nodes[:_MOST_NODES]
    alike = f" ({plural(len(group) - 1, 'more collection')} with the same nodes)" if len(group) > 1 else ""
    more = f"... and {len(first.nodes) - len(nodes):,} more nodes" if len(nodes) < len(first.nodes) else ""
    columns = {name: _NODE_FACTS[name] for name in ("node", "shape", "bytes", "kernel", "made by")}
    return Grid.of(f"Nodes of {wording.name_of(first.path)}{alike}", nodes, columns, more=more)
