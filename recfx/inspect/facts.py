"""Everything known of one table of a converted collection: what the report and its reasons are made of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recfx.diagnostics import Diagnostic
from recfx.errors import ConversionError
from recfx.hashing import HashIndex
from recfx.inspect.index_facts import IndexFacts
from recfx.ir.tables import TableSpec
from recfx.lowering.registry import select_backend
from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.nodes import Lookup
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import NotFused, fused_optimizer_of


@dataclass(frozen=True)
class Kernel:
    """The backend that serves a lookup now.

    Args:
        name: ``""`` where none can.
        passed_over: the backends before it, and why they were not taken.
        refused: why there is none.
    """

    name: str
    passed_over: tuple[Diagnostic, ...]
    refused: Diagnostic | None = None


@dataclass(frozen=True)
class TableFacts:
    """One table of a converted collection.

    Args:
        module_path: of its ``nn.EmbeddingBag`` in the model.
        spec: the compiler's description.
        config: TorchRec's.
        bag: what holds the weight.
        weight: the ``[rows, dim]`` parameter.
        index: None where ids are rows.
        index_facts: what the index shows of itself; None without one, and on meta.
        kernel: what serves its lookup.
        optimizer: fused, in backward but not fused, or None.
        existed: whether the table was there before recfx: converted, not built directly.
    """

    module_path: str
    spec: TableSpec
    config: EmbeddingBagConfig
    bag: nn.EmbeddingBag
    weight: nn.Parameter
    index: HashIndex | None
    index_facts: IndexFacts | None
    kernel: Kernel
    optimizer: FusedOptimizer | NotFused | None
    existed: bool


def table_facts(collection: HashEmbeddingBagCollection, path: str, existed: bool) -> list[TableFacts]:
    """The tables of ``collection``, in order; changes nothing.

    Args:
        collection: a converted collection.
        path: its fully qualified name in the model.
        existed: whether its tables were there before recfx.
    """
    kernels, indexes = kernels_by_table(collection.graph_module), dict(collection.hash_indexes.items())
    facts = []
    for spec, config in zip(collection.tables, collection.embedding_bag_configs(), strict=True):
        bag = collection.embedding_bags[spec.name]
        assert isinstance(bag, nn.EmbeddingBag)
        index = indexes.get(spec.name)
        assert index is None or isinstance(index, HashIndex)
        facts.append(
            TableFacts(
                module_path=f"{path}.embedding_bags.{spec.name}" if path else f"embedding_bags.{spec.name}",
                spec=spec,
                config=config,
                bag=bag,
                weight=collection.weight(spec.name),
                index=index,
                index_facts=None if index is None else IndexFacts.of(index),
                kernel=kernels[spec.name],
                optimizer=_optimizer(collection, spec.name, collection.weight(spec.name)),
                existed=existed,
            )
        )
    return facts


def kernels_by_table(graph_module: nn.Module) -> dict[str, Kernel]:
    """The kernel that each table's lookup takes as the tables are now: they may have moved since it was lowered."""
    kernels: dict[str, Kernel] = {}
    for module in graph_module.children():
        if not isinstance(module, Lookup):
            continue
        try:
            choice = select_backend(module.spec(), module.backend, module.collection)
            kernel = Kernel(choice.backend, choice.declined)
        except ConversionError as error:
            kernel = Kernel("", (), error.diagnostic)
        kernels |= {table.name: kernel for table in module.tables}
    return kernels


def _optimizer(
    collection: HashEmbeddingBagCollection, table: str, weight: nn.Parameter
) -> FusedOptimizer | NotFused | None:
    fused = collection.store.optimizers.get(table)
    if fused is not None:
        return fused
    if not getattr(weight, "_in_backward_optimizers", None):
        return None
    # Attached after the conversion: the next forward takes it over.
    return collection.not_fused.get(table) or fused_optimizer_of(weight)
