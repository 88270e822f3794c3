"""The exported graph of one converted collection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from recfx.collections.collection import UnshardedCollection
from recfx.collections.compile_graph import rewritten
from recfx.exporter.buffers import Filling, fillings_of
from recfx.exporter.serving import SCRIPT, PoolRows, ServingTarget
from recfx.exporter.serving.lower_served import lower_served
from recfx.exporter.tables import LocalTable, TableSource, longest_probe
from recfx.ir.context import CollectionContext
from recfx.ir.facts import TableFacts
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.snapshot import PassRecord
from recfx.ir.tables import TableSpec
from recfx.passes import Pass, export_passes, serving_passes


@dataclass(frozen=True)
class ServedCollection:
    """What takes the place of a converted collection in an exported program.

    Args:
        path: fully qualified name of the collection.
        graph_module: its exported graph, whose big buffers are not filled.
        records: what each pass did.
        fillings: the big buffers.
        tables: where its tables come from, by name.
        stored: its tables, with the dtype of stored rows.
        errors: the largest absolute difference between stored rows and the model's, by table, once the buffers are
            filled.
    """

    path: str
    graph_module: fx.GraphModule
    records: list[PassRecord]
    fillings: list[Filling]
    tables: Mapping[str, TableSource]
    stored: tuple[TableSpec, ...]
    errors: dict[str, float]


def serve_collection(
    path: str,
    collection: UnshardedCollection,
    dtypes: Mapping[str, torch.dtype],
    target: ServingTarget = SCRIPT,
) -> ServedCollection:
    """Run the export passes on a collection that this process holds as a whole.

    Args:
        path: its fully qualified name.
        collection: the collection, which does not change.
        dtypes: the dtype of stored rows of each table.
        target: which modules serve the nodes.
    """
    return serve_tables(path, local_tables(collection), collection.is_weighted(), dtypes, target, collection.passes)


def local_tables(collection: UnshardedCollection) -> dict[str, TableSource]:
    """The tables of a collection that this process holds as a whole, by name."""
    indexes = collection.hash_indexes
    return {
        spec.name: LocalTable(
            spec,
            collection.weight(spec.name),
            collection.index(spec.name) if spec.name in indexes else None,
        )
        for spec in collection.tables
    }


def serve_tables(
    path: str,
    tables: Mapping[str, TableSource],
    is_weighted: bool,
    dtypes: Mapping[str, torch.dtype],
    target: ServingTarget = SCRIPT,
    passes: tuple[Pass, ...] | None = None,
) -> ServedCollection:
    """Run the export passes on the graph of a collection that has these tables.

    Args:
        path: fully qualified name of the collection.
        tables: where each table comes from, in the collection's order.
        is_weighted: whether batches carry weights for ids.
        dtypes: the dtype of stored rows of each table.
        target: which modules serve the nodes.
        passes: the passes that make the collection's own graph; None: those of ``recfx.passes()``.
    """
    specs = tuple(source.spec for source in tables.values())
    facts = {name: _facts(source, target.counts_probes) for name, source in tables.items()}
    context = CollectionContext(path, specs, facts, dict.fromkeys(facts, 0), is_weighted)
    made = rewritten(OperatorGraph.of(context, target), [*export_passes(passes), *serving_passes({path: dtypes})])
    graph_module = lower_served(made, target)
    stored = tuple(spec for each in graph_module.modules() if isinstance(each, PoolRows) for spec in each.specs)
    errors: dict[str, float] = {}
    fillings = fillings_of(path, graph_module, tables, errors)
    return ServedCollection(path, graph_module, list(made.records), fillings, tables, stored, errors)


def _facts(source: TableSource, counts_probes: bool) -> TableFacts:
    """What a file's graph is told of a table: its index, and one dtype for all, so that they share a lookup."""
    spec, index = source.spec, source.index
    if index is not None and counts_probes:
        index = replace(index, longest_probe=longest_probe(source))
    return TableFacts(spec.num_embeddings, spec.embedding_dim, torch.float32, "meta", index=index)
