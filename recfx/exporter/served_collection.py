"""The exported graph of one converted collection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from recfx.collections.collection import UnshardedCollection
from recfx.collections.compile_graph import rewritten
from recfx.errors import ExportError
from recfx.exporter.buffers import Filling, TableSource, fillings_of, tables_of
from recfx.exporter.serving.lower_served import lower_served
from recfx.exporter.serving.pool_rows import FORMATS, PoolRows
from recfx.exporter.serving.targets import ServingTarget
from recfx.ir.context import CollectionContext, TableFacts
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.tables import TableSpec
from recfx.passes import export_passes, serving_passes
from recfx.passes.base import PassRecord

Quantized = Literal["fp16", "int8", "int4"] | None
"""How rows are stored; None: as they are."""

_QUANTIZED = {form.name: dtype for dtype, form in FORMATS.items() if dtype != torch.float32}
"""The dtype of quantized rows, by what ``quantize`` calls it."""


def stored_dtypes(
    collections: Mapping[str, tuple[TableSpec, ...]], quantize: Quantized | Mapping[str, Quantized]
) -> dict[str, dict[str, torch.dtype]]:
    """The dtype of stored rows, by collection and table; tables that ``quantize`` does not name keep theirs."""
    chosen, of_others = (quantize, None) if isinstance(quantize, Mapping) else ({}, quantize)
    for choice in (*chosen.values(), of_others):
        if choice is not None and (not isinstance(choice, str) or choice not in _QUANTIZED):
            raise ExportError(
                f"quantize={choice!r} is not a format of rows.",
                reason="invalid_argument",
                what_to_do="pass None, 'fp16', 'int8', 'int4', or a dict of these by table.",
            )
    specs = {f"{path}.{spec.name}": spec for path, tables in collections.items() for spec in tables}
    names = {spec.name for spec in specs.values()}
    unknown = sorted(str(name) for name in chosen if name not in names | specs.keys())
    if unknown:
        raise ExportError(
            f"quantize names table {unknown[0]!r}, which no converted collection has.",
            reason="invalid_argument",
            what_to_do=f"name some of: {', '.join(sorted(names))}.",
        )
    by_table = {name: chosen.get(name, chosen.get(spec.name, of_others)) for name, spec in specs.items()}

    def stored(spec: TableSpec, choice: Quantized) -> torch.dtype:
        """Unquantized rows of other dtypes than float16 are stored as float32."""
        return _QUANTIZED[choice] if choice else (torch.float16 if spec.dtype == torch.float16 else torch.float32)

    return {
        path: {spec.name: stored(spec, by_table[f"{path}.{spec.name}"]) for spec in tables}
        for path, tables in collections.items()
    }


@dataclass(frozen=True)
class ServedCollection:
    """What takes the place of a converted collection in an exported program: its graph, whose big buffers ``fillings``
    has.

    ``stored`` are its tables, with the dtype of stored rows; once the buffers are filled, ``errors`` has the largest
    difference between stored rows and the model's, by table.
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
    target: ServingTarget,
) -> ServedCollection:
    """Run the export passes on the graph of a collection, which does not change."""
    tables = tables_of(collection)
    facts = {name: _facts(source, dtypes[name], target.counts_probes) for name, source in tables.items()}
    context = CollectionContext(
        path,
        collection.tables,
        facts,
        dict.fromkeys(facts, 0),
        collection.is_weighted(),
        need_indices=collection._need_indices,
    )
    made = rewritten(
        OperatorGraph.of(context, target), [*export_passes(collection.passes), *serving_passes({path: dtypes})]
    )
    graph_module = lower_served(made, target)
    stored = tuple(spec for module in graph_module.modules() if isinstance(module, PoolRows) for spec in module.specs)
    errors: dict[str, float] = {}
    fillings = fillings_of(path, graph_module, tables, errors)
    return ServedCollection(path, graph_module, list(made.records), fillings, tables, stored, errors)


def _facts(source: TableSource, stored: torch.dtype, counts_probes: bool) -> TableFacts:
    """What a file's graph is told about a table: its index, and one dtype for all, so that they share a lookup.

    Tables that are not pooled share one if the rows that FBGEMM reads for them have the same number of columns.
    """
    spec, index = source.spec, source.index
    is_wider = not spec.is_pooled and FORMATS[stored].columns(spec.embedding_dim) > spec.embedding_dim
    if index is not None and counts_probes:
        index = replace(index, longest_probe=source.longest_probe())
    dtype = stored if is_wider else torch.float32
    return TableFacts(spec.num_embeddings, spec.embedding_dim, dtype, "meta", index=index)
