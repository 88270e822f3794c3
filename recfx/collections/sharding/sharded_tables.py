"""What a rank has of a sharded collection before anything runs: its shards, and what it knows about all tables."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.local_tables import LocalTables
from recfx.errors import ConversionError, Diagnostic
from recfx.ir.shard import Shard
from recfx.ir.shards import CollectionSharding
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.runtime.dist_groups import DistGroups
from recfx.runtime.host_copies import crosses


class ShardedTables(ConvertedCollection):
    """The tables of a sharded collection as one rank has them; base of ``ShardedCollection``.

    Attributes:
        sharding: which shards are where.
        groups: the process groups of ids and of pooled rows.
        fused: kind and settings of each table's fused optimizer, by table name.
        dtypes: dtypes of the tables' weights, by table name.
        taken: choices about the tables' optimizers that the user did not spell out, by table name.
    """

    is_sharded = True

    sharding: CollectionSharding
    groups: DistGroups
    fused: dict[str, FusedOptimizer]
    dtypes: dict[str, torch.dtype]
    taken: dict[str, tuple[Diagnostic, ...]]
    _made_on: torch.device

    def take_tables(
        self,
        unsharded: UnshardedCollection,
        sharding: CollectionSharding,
        groups: DistGroups,
        local: LocalTables,
    ) -> None:
        """Become the sharded form of ``unsharded``, with this rank's part of its tables."""
        self.collection, self.backend, self.source = unsharded.collection, unsharded.backend, unsharded.source
        self.requested, self.calls, self.passes = dict(unsharded.requested), unsharded.calls, unsharded.passes
        kind = kind_of(self)
        setattr(self, kind.configs_attribute, kind.configs_of(unsharded))
        setattr(self, kind.tables, local.bags)
        self._is_weighted = unsharded.is_weighted()
        self.tables = tuple(replace(table, id_range=None) for table in unsharded.tables)  # as in the sharding
        self.sharding, self.groups = sharding, groups
        self.not_fused = dict(unsharded.not_fused)
        self.hash_indexes, self._store = local.indexes, local.store
        self.fused, self.dtypes, self.taken = local.fused, local.dtypes, local.taken
        self._store.forwards = unsharded.store.forwards
        self._row_moves = {}
        self._made_on = local.store.device

    def refuse_moved(self) -> None:
        """Refuse to run after the tables were moved between the host and another device.

        Not in ``to()`` itself, because a model that stops halfway through it would be on two devices.

        Raises:
            ConversionError: ``sharded_tables_moved``.
        """
        found, host = self._store.device, torch.device("cpu")
        if crosses(found, host) == crosses(self._made_on, host):
            return
        raise ConversionError(
            f"the collection was sharded with its tables on {self._made_on}, but they have been moved to {found}; its "
            f"process groups, and its copies of ids between the host and a device, are for {self._made_on}.",
            reason="sharded_tables_moved",
            module_path=self.collection,
            what_to_do=f"move the model back to {self._made_on}; or unconvert it, move it to {found}, and shard it "
            "there, in process groups of that device.",
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that have the shards."""
        return self.groups.pooled

    def local_shards(self, table: str) -> list[Shard]:
        """This rank's shards of a table."""
        return self.sharding.local_of(table)
