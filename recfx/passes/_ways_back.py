"""In which ways pooled rows of a sharded collection travel: for each group of tables who sends what, and what arrives.

``insert_dist`` makes nodes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recfx.ir.columns import Columns, total_dim
from recfx.ir.meta import Collective
from recfx.ir.shards import ROW_WISE, TABLE_ROW_WISE, TABLE_WISE, CollectionSharding, Shard
from recfx.nodes import OutputDistStart
from recfx.nodes.dist_groups import DistGroups
from recfx.nodes.output_dist import AllToAll, CrossHost, OwnBatch, ReduceScatter
from recfx.passes import _collectives as wire


@dataclass(frozen=True)
class WaysBack:
    """Of one collection, seen from one rank.

    Args:
        sharding: of the collection.
        groups: the process groups to communicate in.
        device: of the pooled rows.
    """

    sharding: CollectionSharding
    groups: DistGroups
    device: torch.device

    def first_hop(self, group: str, parts: list[list[Columns]]) -> tuple[OutputDistStart, tuple[Collective, ...]]:
        """What sends the rows that this rank has pooled, and what it puts on the wire.

        Args:
            group: one of ``GROUPS``.
            parts: the columns of each input.
        """
        sharding, groups, ranks, device = self.sharding, self.groups, self.sharding.world_size, self.device
        if group == TABLE_WISE:
            sent = self._by_rank()
            mine, dims = sent[sharding.rank], [total_dim(columns) for columns in sent]
            return AllToAll(groups.pooled, mine, parts, device, dims), wire.of_all_to_all(mine, sum(dims), ranks)
        if group == ROW_WISE:
            columns = self._everywhere(group)
            return ReduceScatter(groups.pooled, columns, parts, device), wire.of_reduce_scatter(columns, ranks)
        if group == TABLE_ROW_WISE:
            hosts = self._by_host()
            columns = hosts[sharding.rank // sharding.local_size]
            collectives = wire.of_reduce_scatter(columns, sharding.local_size, len(hosts))
            return ReduceScatter(groups.intra, columns, parts, device, len(hosts)), collectives
        columns = self._everywhere(group)
        return OwnBatch(groups.pooled, columns, parts, device), wire.of_own_batch(columns, ranks)

    def second_hop(self) -> tuple[CrossHost, tuple[Collective, ...]]:
        """Of ``TABLE_ROW_WISE``: sums of one host, for this rank and its counterparts, to the ranks of the samples."""
        sharding, hosts = self.sharding, self._by_host()
        host, local_rank = divmod(sharding.rank, sharding.local_size)
        mine, dims = hosts[host], [total_dim(columns) for columns in hosts]
        hop = CrossHost(self.groups.cross, mine, [mine], self.device, dims, local_rank, sharding.local_size)
        return hop, wire.of_all_to_all(mine, sum(dims), len(hosts))

    def arriving(self, group: str) -> list[Columns]:
        """What this rank gets for its own samples, after the last hop."""
        if group in (TABLE_WISE, TABLE_ROW_WISE):
            senders = self._by_rank() if group == TABLE_WISE else self._by_host()
            return [column for columns in senders for column in columns]
        return self._everywhere(group)

    def _by_rank(self) -> list[list[Columns]]:
        """Columns of the tables and column blocks that are on one rank each."""
        ranks = range(self.sharding.world_size)
        return [_columns_of(self.sharding.on_rank(rank, (TABLE_WISE,))) for rank in ranks]

    def _by_host(self) -> list[list[Columns]]:
        """Columns whose rows are cut over the ranks of one host, once each."""
        local_size, shards = self.sharding.local_size, self._shards(TABLE_ROW_WISE)
        hosts = range(self.sharding.world_size // local_size)
        return [_once([shard for shard in shards if shard.rank // local_size == host]) for host in hosts]

    def _everywhere(self, group: str) -> list[Columns]:
        """Columns that every rank has a part of, or all of."""
        return _once(self._shards(group))

    def _shards(self, group: str) -> list[Shard]:
        return [shard for table in self.sharding.tables if table.group == group for shard in table.shards]


def _columns_of(shards: list[Shard]) -> list[Columns]:
    return [column for shard in shards for column in shard.output_columns]


def _once(shards: list[Shard]) -> list[Columns]:
    return list(dict.fromkeys(_columns_of(shards)))
