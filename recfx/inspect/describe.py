"""Fills the report of an unsharded collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import shown_by
from recfx.errors import Diagnostic
from recfx.inspect.collection_report import CollectionReport, NodeReport, PassReport
from recfx.inspect.describe_tables import report_of_other_table, table_report
from recfx.inspect.facts import table_facts
from recfx.inspect.reasons import type_name
from recfx.inspect.transfer_reasons import transfer_reasons
from recfx.ir.meta import NodeMeta, node_meta
from recfx.ir.snapshot import PassRecord


def describe_converted(found: CollectionReport, collection: UnshardedCollection, existed: bool) -> CollectionReport:
    """Add what a converted collection shows of itself, but not yet what there is to say about it: see ``with_reasons``.

    Args:
        found: what discovery knows of it.
        collection: the collection; nothing of it changes.
        existed: whether its tables were there before recfx.
    """
    own = {table.name: table.name for table in collection.tables}
    facts = table_facts(collection, own, found.path, existed)
    described = replace(
        found,
        is_weighted=collection.is_weighted(),
        device=str(collection.device),
        tables=tuple(table_report(facts[table.name]) for table in collection.tables),
    )
    return with_graph(described, collection)


def describe_other(found: CollectionReport, collection: nn.Module) -> CollectionReport:
    """Add what a collection that was not converted shows of itself, which may be nothing."""
    names = shown_by(collection)
    if names is None:
        return found
    read, holder = names
    try:
        configs = list(getattr(collection, read)())
        asked = getattr(collection, "is_weighted", None)  # sequences have no such thing
        is_weighted = asked() if callable(asked) else None
        device = str(getattr(collection, "device", "") or "")
        modules = getattr(collection, holder, {})
        tables = tuple(report_of_other_table(config, modules) for config in configs)
    except Exception:  # a foreign class may implement none of this; then the report has less to show
        return found
    return replace(found, is_weighted=is_weighted, device=device, tables=tables)


def with_graph(described: CollectionReport, collection: ConvertedCollection) -> CollectionReport:
    """Add what became of the collection's graph, and how, and what its graph says about devices."""
    metas = {node.name: meta for node in collection.graph_module.graph.nodes if (meta := node_meta(node)) is not None}
    reasons = described.reasons + transfer_reasons(collection, described.path)
    return replace(with_nodes(described, metas, collection.pass_records), reasons=reasons)


def with_nodes(
    described: CollectionReport, metas: Mapping[str, NodeMeta], records: Sequence[PassRecord]
) -> CollectionReport:
    """Show these nodes of a graph, by name, and the passes that have made it, in place of those before."""
    return replace(
        described,
        nodes=tuple(_node(name, meta) for name, meta in metas.items()),
        passes=tuple(PassReport(record.name, record.modified, record.text) for record in records),
        declined=tuple(declined for record in records for declined in record.declined),
    )


def with_reasons(described: CollectionReport, of_collection: tuple[Diagnostic, ...] = ()) -> CollectionReport:
    """Add the reasons about the collection as a whole, then those about its tables."""
    of_tables = tuple(reason for table in described.tables for reason in table.reasons)
    return replace(described, reasons=described.reasons + of_collection + of_tables)


def _node(name: str, meta: NodeMeta) -> NodeReport:
    dtype = "" if meta.dtype is None else type_name(meta.dtype)
    return NodeReport(
        name, meta.kind, meta.tables, meta.made_by, meta.shape, dtype, meta.bytes, meta.device, meta.kernel
    )
