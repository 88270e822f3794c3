"""What a graph is about, as frozen data beside it: its collections, their tables, the plan, and facts of the tables.

Nothing here lives: a context can be made for any rank of any plan, on any device, anywhere.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch

from recfx.errors import Diagnostic
from recfx.ir.meta import SourceLocation
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import KeyOrder, TableSpec, embedding_names
from recfx.ir.ways_back import Hop, WayBack


@dataclass(frozen=True)
class OptimizerFacts:
    """The fused optimizer of a table."""

    rule: str  # the name of its rule
    # its settings, sorted by name, without the learning rate, which may change from step to step
    group: tuple[tuple[str, Hashable], ...] = ()


@dataclass(frozen=True)
class FrozenIndex:
    """What is known of a table's index that no longer changes; its policy is in the table's ``TableSpec.hashing``."""

    slots: int  # the number of slots of its slot table, see ``recfx/kernels/index/slot_table.py``
    side_row: int  # the row of id -1, which slots cannot hold; -1 if it has none
    longest_probe: int = 0  # the most slots that finding one of its ids reads; 0 if nobody has counted


@dataclass(frozen=True)
class TableFacts:
    """A table, or a shard of one."""

    rows: int
    embedding_dim: int
    dtype: torch.dtype
    device: str  # the type of its device
    # whether its rows lie one after the other in memory, and not as a view that negates them
    is_contiguous: bool = True
    optimizer: OptimizerFacts | None = None  # the fused optimizer; None if the gradient goes to ``weight.grad``
    is_trained: bool = True  # whether the backward reaches it
    index: FrozenIndex | None = None  # its frozen index, in a file; None in a model, and for a table without an index


@dataclass(frozen=True)
class LookupFacts:
    """A lookup, as data."""

    tables: tuple[TableSpec, ...]  # the descriptions of the tables, in column order
    combine: str  # ``"SUM"``, ``"MEAN"`` or ``"NONE"``: what becomes of the rows of a bag
    is_weighted: bool  # whether per-sample weights multiply the rows
    facts: tuple[TableFacts, ...]  # what else is known about each table

    @cached_property
    def device_types(self) -> frozenset[str]:
        return frozenset(table.device for table in self.facts)

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(table.dtype for table in self.facts)

    @property
    def is_contiguous(self) -> bool:
        return all(table.is_contiguous for table in self.facts)

    @cached_property
    def optimizers(self) -> tuple[OptimizerFacts, ...]:
        """The tables' fused optimizers, equal ones once; empty if there are none."""
        return tuple(dict.fromkeys(table.optimizer for table in self.facts if table.optimizer is not None))


_HOST = ("", "cpu", "meta")  # devices from which the host, where indexes are, reads ids without a copy


@dataclass(frozen=True)
class CollectionContext:
    """One collection as one rank sees it."""

    name: str  # fully qualified name in the user's model; ``""`` for a root
    tables: tuple[TableSpec, ...]  # its tables, whole, in order
    # what the tensors and the optimizer of each table would tell, by the name of the whole table
    facts: Mapping[str, TableFacts]
    # tables with equal numbers may share a kernel call, because they are on one device and their optimizers were
    # set alike; by the name of the whole table
    kernel_groups: Mapping[str, int] = field(default_factory=dict)
    is_weighted: bool = False  # whether the batch's weights multiply the rows
    sharding: CollectionSharding | None = None  # how it is sharded, and the rank; None if all of it is on one rank
    ids_on_host: bool = True  # whether ranks exchange ids on the host
    source: SourceLocation | None = None  # where the user's code creates it, if known
    need_indices: bool = False  # whether the output has the ids as well, if it has a row for each id

    @property
    def is_pooled(self) -> bool:
        """Whether the output has one row per sample; otherwise it has one per id. All tables are alike."""
        return self.tables[0].is_pooled

    @property
    def assembled_by(self) -> str:
        return "keyed_tensor" if self.is_pooled else "jagged_dict"

    @cached_property
    def device(self) -> str:
        return next((facts.device for facts in self.facts.values()), "")

    @property
    def copies_ids(self) -> bool:
        """Whether ids are copied to the host to be hashed, and their rows back."""
        return self.device not in _HOST

    @property
    def index_device(self) -> str:
        return "cpu" if self.copies_ids else self.device

    @cached_property
    def sends_different(self) -> bool:
        """Whether any table sends each different id once, if it is sharded."""
        return any(table.sends_different for table in self.tables)

    @cached_property
    def local(self) -> tuple[TableSpec, ...]:
        """The shards of this rank, as tables; the tables themselves if they are not sharded."""
        return self.tables if self.sharding is None else tuple(shard.spec for shard in self.sharding.local())

    @cached_property
    def keys(self) -> KeyOrder:
        return KeyOrder.of(embedding_names(self.tables))

    @cached_property
    def local_keys(self) -> KeyOrder:
        """The keys that lookups see."""
        return KeyOrder.of(embedding_names(self.local))

    @cached_property
    def sent_keys(self) -> tuple[str, ...]:
        """The keys that a rank sends, in order: the keys of the shards of all ranks, rank by rank."""
        return KeyOrder.of(key for shard in self._sharding.by_rank() for key in shard.keys)

    def by_name(self, local: bool) -> Mapping[str, TableSpec]:
        """Tables by name: a shard may have the name of its table, so kinds of nodes declare which they mean."""
        return self._by_name[local]

    def facts_of(self, table: TableSpec) -> TableFacts:
        facts = self.facts[table.table_name]
        if (facts.rows, facts.embedding_dim) == (table.num_embeddings, table.embedding_dim):
            return facts
        return replace(facts, rows=table.num_embeddings, embedding_dim=table.embedding_dim)

    def way(self, name: str) -> WayBack:
        return next(way for way in self._sharding.ways_back if way.name == name)

    def hops(self, way: str) -> tuple[Hop, ...]:
        """What this rank sends back this way, hop by hop."""
        return self._hops[way]

    @property
    def _sharding(self) -> CollectionSharding:
        assert self.sharding is not None  # the verifier refuses the nodes that ask for it
        return self.sharding

    @cached_property
    def _hops(self) -> dict[str, tuple[Hop, ...]]:
        sharding = self._sharding
        seen_from = sharding.rank, sharding.world_size, sharding.wires
        return {way.name: way.hops(sharding.travelling(way), *seen_from) for way in sharding.ways_back}

    @cached_property
    def _by_name(self) -> list[dict[str, TableSpec]]:
        return [{table.name: table for table in tables} for tables in (self.tables, self.local)]


@dataclass(frozen=True)
class Served:
    """The answer of kernel targets for one lookup."""

    backend: str  # the name of the backend that serves it, with the form of its kernels if it has several
    declined: tuple[Diagnostic, ...] = ()  # the backends that come before it, and why they do not
    finding_declined: Diagnostic | None = None  # why it has no kernel that takes raw ids; None if it has one


class Targets(Protocol):
    """The kernel targets, as far as passes ask them."""

    def serve(self, lookup: LookupFacts, collection: str) -> Served:
        """Which backend serves a lookup of a collection, which is named for messages."""

    def may_name(self, backend: str) -> bool:
        """Whether a pass may have decided on this backend for a lookup."""

    def find_rows(self, device: str) -> Served:
        """Which backend finds rows in copies of indexes on devices of this type; ``"reference"``: none has a kernel."""

    def index_operators(self, device: str) -> str:
        """The backend whose operators find and insert ids in indexes on devices of this type; ``""`` if none runs."""


@dataclass(frozen=True)
class Context:
    """All that a graph is about."""

    collections: Mapping[str, CollectionContext]
    targets: Targets
