"""The tables of a sharded collection as formulas need them, on all ranks, each found out once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from recfx.ir.meta import SourceLocation
from recfx.ir.sent_rows import SentRows
from recfx.ir.shard import Shard
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.ir.tables import TableSpec
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.passes import Pass
from recfx.planner.pricing.node_facts import TableLoad
from recfx.planner.pricing.residents import planned_resident
from recfx.planner.pricing.symbols import Symbols
from recfx.planner.pricing.work import Resident


@dataclass(frozen=True)
class TableTraits:
    """What a plan does not say about a table.

    Args:
        dtype: of its rows.
        fused: its fused optimizer, if it has one.
        is_trained: whether the backward reaches it.
    """

    dtype: torch.dtype
    fused: FusedOptimizer | None = None
    is_trained: bool = True

    @cached_property
    def group(self) -> Hashable:
        """Tables of one group share a lookup."""
        return self.dtype, None if self.fused is None else self.fused.settings()


class PlannedTable:
    """One table, sharded.

    Args:
        sharded: its shards.
        traits: what else is known of it.
        world_size: the number of ranks.
        symbols: of the batch.
    """

    def __init__(self, sharded: ShardedTable, traits: TableTraits, world_size: int, symbols: Symbols) -> None:
        self.table, self.way, self.traits = sharded.table, sharded.way_back, traits
        self.shards = sharded.filled
        self.rows = SentRows.of(self.shards, world_size, self.way.local_size)
        self.is_cut = any(shard.piece >= 0 for shard in self.shards)
        blocks = {shard.columns for shard in self.shards}
        self.times_sent = len(blocks) if self.is_cut else len(self.shards)
        """How often its ids are sent: to every replica, and for every block of columns."""
        self._symbols, self._rule = symbols, None if traits.fused is None else traits.fused.rule
        self._loads: dict[tuple[int, int], TableLoad] = {}
        self._residents: dict[tuple[tuple[int, int], int], Resident] = {}
        self.on_rank: dict[int, list[Shard]] = {}
        for shard in self.shards:
            self.on_rank.setdefault(shard.rank, []).append(shard)

    def load(self, shard: Shard) -> TableLoad:
        """The load of one shard; shards of equal size have the same."""
        size = (shard.num_rows, shard.num_columns)
        found = self._loads.get(size)
        if found is None:
            row_bytes, rows = shard.num_columns * self.traits.dtype.itemsize, self.table.num_embeddings
            found = TableLoad.of(shard.spec, rows, row_bytes, self._rule, self.traits.is_trained, self._symbols)
            self._loads[size] = found
        return found

    def resident(self, shard: Shard) -> Resident:
        """What one shard keeps."""
        key = (shard.rows, shard.num_columns)
        found = self._residents.get(key)
        if found is None:
            found = self._residents[key] = planned_resident(shard.spec, self.traits.dtype, self._rule)
        return found


@dataclass(frozen=True)
class PlannedCollection:
    """One collection, sharded.

    Args:
        name: its fully qualified name.
        sharding: its tables on all ranks.
        traits: by table name.
        is_weighted: whether ids carry weights.
        calls: how often a step calls it.
        backend: kernel target of its lookups, as for ``convert``.
        source: where the user's code creates it, if known.
        passes: the passes that make its graph, if the user named them; None: those of ``recfx.passes()``.
    """

    name: str
    sharding: CollectionSharding
    traits: Mapping[str, TableTraits]
    is_weighted: bool
    calls: int = 1
    backend: str = "auto"
    source: SourceLocation | None = None
    passes: tuple[Pass, ...] | None = None

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The whole tables."""
        return tuple(each.table for each in self.sharding.tables)

    def seen_from(self, rank: int) -> PlannedCollection:
        """This collection as another rank sees it."""
        return replace(self, sharding=replace(self.sharding, rank=rank))


def exchanges_ids_on_host(device: str) -> bool:
    """Whether the ranks of a plan exchange ids on the host.

    nccl exchanges them between GPUs. The group for the ids of NPUs is one of gloo, as that of hosts is.

    Args:
        device: the type of the device that has the tables.
    """
    return device != "cuda"
