"""The exported graph of one converted collection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from recfx.exporter.buffers import Filling, fillings_of
from recfx.exporter.tables import LocalTable, TableSource, longest_probe
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.tables import TableSpec
from recfx.lowering.targets import TargetsHere
from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.modules.compile_graph import compile_graph, context_of
from recfx.nodes import TableStore
from recfx.nodes.resources import Resources
from recfx.passes import PassRecord, export_passes, run_passes, serving_passes
from recfx.passes.base import PASSES_KEY
from recfx.serving import SCRIPT, PoolRows, ServingTarget


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
    collection: HashEmbeddingBagCollection,
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
    return serve_tables(path, local_tables(collection), collection.is_weighted(), dtypes, target)


def local_tables(collection: HashEmbeddingBagCollection) -> dict[str, TableSource]:
    """The tables of a collection that this process holds as a whole, by name."""
    indexes = collection.hash_indexes
    return {
        spec.name: LocalTable(
            spec,
            collection.embedding_bags.get_submodule(spec.name).weight,  # type: ignore[arg-type]
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
) -> ServedCollection:
    """Run the export passes on the graph of a collection that has these tables.

    Args:
        path: fully qualified name of the collection.
        tables: where each table comes from, in the collection's order.
        is_weighted: whether batches carry weights for ids.
        dtypes: the dtype of stored rows of each table.
        target: which modules serve the nodes.
    """
    specs = tuple(source.spec for source in tables.values())
    resources = Resources(_empty_store(specs))
    context = context_of(path, specs, is_weighted, resources)
    graph_module = compile_graph(OperatorGraph.of(context, TargetsHere()), resources, "auto", export_passes())
    frozen = {name: source.index for name, source in tables.items()}
    if target.counts_probes:
        frozen = {
            name: index and replace(index, longest_probe=longest_probe(tables[name])) for name, index in frozen.items()
        }
    indexes = {path: {name: index for name, index in frozen.items() if index is not None}}
    run_passes(graph_module, serving_passes(indexes, {path: dtypes}, target))
    records = list(graph_module.meta[PASSES_KEY])
    lookups = [module for module in graph_module.modules() if isinstance(module, PoolRows)]
    stored = tuple(spec for lookup in lookups for spec in lookup.specs)
    errors: dict[str, float] = {}
    fillings = fillings_of(path, graph_module, tables, errors)
    return ServedCollection(path, graph_module, records, fillings, tables, stored, errors)


def _empty_store(specs: tuple[TableSpec, ...]) -> TableStore:
    """A store of tables on meta, of one dtype, so that they all share a lookup."""
    bags = nn.ModuleDict()
    for spec in specs:
        bags[spec.name] = nn.EmbeddingBag(spec.num_embeddings, spec.embedding_dim, device="meta")
    return TableStore(bags, nn.ModuleDict(), {}, {})
