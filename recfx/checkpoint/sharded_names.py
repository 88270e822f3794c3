"""The sharded tables of a model, and their names in a checkpoint, which are those of whole tables."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from recfx.collections.converted_collection import collections_by_prefix
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.state import whole_index
from recfx.hashing.index import HashIndex
from recfx.hashing.row_move import saved_names
from recfx.ir.shard import Shard
from recfx.ir.shards import ShardedTable


@dataclass(frozen=True)
class NamedTable:
    """One sharded table under one name.

    Args:
        prefix: the prefix of its collection.
        module: its collection.
        table: the table and its shards.
        first: whether this is the first name of the collection.
    """

    prefix: str
    module: ShardedCollection
    table: ShardedTable
    first: bool

    @property
    def name(self) -> str:
        """The name of the table."""
        return self.table.table.name

    @property
    def weight(self) -> str:
        """Name of the weight in the model."""
        return self.prefix + kind_of(self.module).weight_name("", self.name)

    def index_keys(self) -> dict[str, str]:
        """Names of its index's state in the model, by buffer name; empty if it has no index."""
        if not self.table.table.has_index:
            return {}
        return {name: self.index_key(name) for name in saved_names(whole_index(self.table.table))}

    def index_key(self, name: str) -> str:
        """Name of one buffer of its index."""
        return f"{self.prefix}hash_indexes.{self.name}.{name}"

    def local(self) -> list[Shard]:
        """The shards of this rank."""
        return self.module.sharding.local_of(self.table.table.name)

    def local_indexes(self) -> list[HashIndex]:
        """The indexes of the shards of this rank."""
        if not self.table.table.has_index:
            return []
        return [self.module.store.index(shard.name) for shard in self.local()]

    def own_saved_shards(self) -> list[Shard]:
        """The shards of this rank that are saved: one copy of each number."""
        return [shard for shard in self.table.saved if shard.rank == self.module.sharding.rank]

    def own_saved_slices(self) -> list[Shard]:
        """One shard per slice of rows whose index this rank saves; all column blocks have the same index."""
        slices = self.table.slices(self.table.saved)
        return [shard for shard in slices if shard.rank == self.module.sharding.rank]

    def is_first_shard_here(self) -> bool:
        """Whether this rank saves what all shards have in common."""
        return self.table.saved[0].rank == self.module.sharding.rank


def sharded_tables(model: nn.Module) -> list[NamedTable]:
    """Every sharded table under every name: a state has the keys of a shared module once per name."""
    seen: set[int] = set()
    found = []
    for prefix, module in collections_by_prefix(model, ShardedCollection):
        found += [NamedTable(prefix, module, table, id(module) not in seen) for table in module.sharding.tables]
        seen.add(id(module))
    return found


def sharded_parameters(model: nn.Module) -> dict[int, tuple[NamedTable, Shard]]:
    """The shard that each parameter of this rank is, by the ``id`` of the parameter."""
    return {
        id(table.module.store.weight(shard.name)): (table, shard)
        for table in sharded_tables(model)
        if table.first
        for shard in table.local()
    }
