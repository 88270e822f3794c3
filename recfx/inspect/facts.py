"""Everything that is known about one table of a converted collection: the report and its reasons are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.errors import ConversionError, Diagnostic
from recfx.hashing import HashIndex
from recfx.inspect.index_facts import IndexFacts
from recfx.ir.tables import TableSpec
from recfx.lowering.registry import select_backend
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import fused_optimizer_of
from recfx.runtime import Lookup


@dataclass(frozen=True)
class Kernel:
    """The backend that serves a lookup now.

    Args:
        name: its name; ``""`` if no backend can serve the lookup.
        passed_over: the backends before it, and why they were not taken.
        refused: why no backend can serve it.
    """

    name: str
    passed_over: tuple[Diagnostic, ...]
    refused: Diagnostic | None = None


@dataclass(frozen=True)
class TableFacts:
    """One table of a converted collection.

    Args:
        module_path: path in the model of the module that holds the weight.
        spec: the compiler's description.
        config: TorchRec's config.
        weight: the ``[rows, dim]`` parameter.
        index: its index; None if ids are rows.
        index_facts: what can be read from the index; None without an index, and on meta.
        kernel: the kernel that serves its lookup.
        optimizer: fused, in backward but not fused, or None.
        existed: whether the table existed before recfx, so that it was converted rather than built directly.
    """

    module_path: str
    spec: TableSpec
    config: BaseEmbeddingConfig
    weight: nn.Parameter
    index: HashIndex | None
    index_facts: IndexFacts | None
    kernel: Kernel
    optimizer: FusedOptimizer | Diagnostic | None
    existed: bool


def table_facts(
    collection: ConvertedCollection, parts: Mapping[str, str], path: str, existed: bool
) -> dict[str, TableFacts]:
    """The tables of ``collection`` of which this rank has a part, by name; changes nothing.

    Args:
        collection: a converted collection, sharded or not.
        parts: the collection's name for this rank's part of each table, by name of the table.
        path: its fully qualified name in the model.
        existed: whether its tables existed before recfx.
    """
    kernels, indexes = _kernels_by_table(collection.graph_module), dict(collection.hash_indexes.items())
    facts, kind = {}, kind_of(collection)
    for spec, config in zip(collection.tables, kind.configs_of(collection), strict=True):
        if spec.name not in parts:
            continue
        name = parts[spec.name]
        index = indexes.get(name)
        assert index is None or isinstance(index, HashIndex)
        facts[spec.name] = TableFacts(
            module_path=kind.table_path(path, name),
            spec=spec,
            config=config,
            weight=collection.weight(name),
            index=index,
            index_facts=None if index is None else IndexFacts.of(index),
            kernel=kernels[name],
            optimizer=_optimizer(collection, name, kind.table_path(path, name)),
            existed=existed,
        )
    return facts


def _kernels_by_table(graph_module: nn.Module) -> dict[str, Kernel]:
    """The kernel that each table's lookup uses now: tables may have moved since the graph was lowered."""
    kernels: dict[str, Kernel] = {}
    for module in graph_module.modules():
        if not isinstance(module, Lookup):
            continue
        try:
            choice = select_backend(module.spec(), module.backend, module.collection)
            kernel = Kernel(choice.backend, choice.declined)
        except ConversionError as error:
            kernel = Kernel("", (), error.diagnostic)
        kernels |= {table.name: kernel for table in module.tables}
    return kernels


def _optimizer(collection: ConvertedCollection, table: str, path: str) -> FusedOptimizer | Diagnostic | None:
    fused = collection.store.optimizers.get(table)
    weight = collection.weight(table)
    if fused is not None or collection.is_sharded or not attached_optimizers(weight):
        return fused
    # It was attached after the conversion; the next forward takes it over.
    return collection.not_fused.get(table) or fused_optimizer_of(weight, path)
