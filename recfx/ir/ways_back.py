"""The ways in which pooled rows are sent back: who sends what, what arrives, and what it costs.

``B`` is the batch size of a rank, the same on all ranks; bytes are those of the tables' outputs. Backwards are also
collectives, in which the modules of ``output_dist_start`` average gradients over ranks, as TorchRec's do. This is data
alone: ``recfx.runtime.output_dist`` makes the modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from recfx.ir.columns import Columns, total_bytes, total_dim
from recfx.ir.meta import BATCH, WORLD, Collective
from recfx.ir.sent_rows import SentRows
from recfx.ir.shard import Shard
from recfx.ir.way_back import Hop, HopSize, WayBack, World

_EVERYBODY: sympy.Expr = WORLD * BATCH


@dataclass(frozen=True)
class AllToAllBack(WayBack):
    """A rank has whole rows of its columns: one all-to-all brings the columns of all ranks together."""

    name = "table_wise"
    place = 0
    wording = "all-to-all"

    def hops(self, shards: Sequence[Shard], world: World) -> tuple[Hop, ...]:
        """One."""
        sent = _by_rank(shards, world)
        mine, dims = sent[world.rank], tuple(total_dim(columns) for columns in sent)
        collectives = _all_to_all(total_bytes(mine), sum(map(total_bytes, sent)), world.size)
        return (Hop("all_to_all", "pooled", tuple(mine), _EVERYBODY, collectives, dims),)

    def hop_sizes(self, sent: SentRows, shards: Sequence[Shard], world: World) -> tuple[HopSize, ...]:
        """One."""
        mine = sent.by_rank[world.rank]
        return (HopSize(mine.dim, _EVERYBODY, _all_to_all(mine.bytes, sent.once.bytes, world.size)),)

    def arriving(self, shards: Sequence[Shard], world: World) -> list[Columns]:
        """One rank after another."""
        return [column for columns in _by_rank(shards, world) for column in columns]


@dataclass(frozen=True)
class ReduceScatterBack(WayBack):
    """Every rank has a part of every sum: a reduce-scatter adds them up."""

    name = "row_wise"
    place = 1
    wording = "summed over ranks"

    def hops(self, shards: Sequence[Shard], world: World) -> tuple[Hop, ...]:
        """One."""
        columns = _once(shards)
        collectives = _reduce_scatter(total_bytes(columns), world.size)
        return (Hop("reduce_scatter", "pooled", tuple(columns), _EVERYBODY, collectives),)

    def hop_sizes(self, sent: SentRows, shards: Sequence[Shard], world: World) -> tuple[HopSize, ...]:
        """One."""
        return (HopSize(sent.once.dim, _EVERYBODY, _reduce_scatter(sent.once.bytes, world.size)),)

    def arriving(self, shards: Sequence[Shard], world: World) -> list[Columns]:
        """Everything."""
        return _once(shards)


@dataclass(frozen=True)
class TwoHops(WayBack):
    """The ranks of a host have parts of its sums: a reduce-scatter inside hosts, then an all-to-all across them."""

    name = "table_row_wise"
    place = 2
    wording = "summed on a host, then all-to-all"
    hop_count = 2

    def hops(self, shards: Sequence[Shard], world: World) -> tuple[Hop, ...]:
        """The second sends the sums of one host, for this rank and its counterparts, to the ranks of the samples."""
        by_host = self._by_host(shards, world)
        columns, dims = tuple(by_host[world.rank // self.local_size]), tuple(map(total_dim, by_host))
        on_host, everywhere, hosts = total_bytes(columns), sum(map(total_bytes, by_host)), len(by_host)
        inside = _reduce_scatter(on_host, self.local_size, hosts)
        across = _all_to_all(on_host, everywhere, hosts, across_hosts=True)
        return (
            Hop("reduce_scatter", "intra", columns, _EVERYBODY, inside, hosts=hosts),
            Hop("cross_host", "cross", columns, hosts * BATCH, across, dims),
        )

    def hop_sizes(self, sent: SentRows, shards: Sequence[Shard], world: World) -> tuple[HopSize, ...]:
        """Two."""
        mine, hosts = sent.by_host[world.rank // self.local_size], len(sent.by_host)
        return (
            HopSize(mine.dim, _EVERYBODY, _reduce_scatter(mine.bytes, self.local_size, hosts)),
            HopSize(mine.dim, hosts * BATCH, _all_to_all(mine.bytes, sent.once.bytes, hosts, across_hosts=True)),
        )

    def arriving(self, shards: Sequence[Shard], world: World) -> list[Columns]:
        """One host after another."""
        return [column for columns in self._by_host(shards, world) for column in columns]

    def _by_host(self, shards: Sequence[Shard], world: World) -> list[list[Columns]]:
        """Columns whose rows are cut over the ranks of one host, each listed once."""
        hosts = range(world.size // self.local_size)
        return [_once([shard for shard in shards if shard.rank // self.local_size == host]) for host in hosts]


@dataclass(frozen=True)
class Stay(WayBack):
    """Every rank has pooled the samples of all ranks: nothing is sent, but the gradients of all ranks are gathered."""

    name = "data_parallel"
    place = 3
    wording = "stay"

    def hops(self, shards: Sequence[Shard], world: World) -> tuple[Hop, ...]:
        """One node, which takes this rank's samples."""
        columns = _once(shards)
        collectives = _own_batch(total_bytes(columns), world.size)
        return (Hop("own_batch", "pooled", tuple(columns), _EVERYBODY, collectives),)

    def hop_sizes(self, sent: SentRows, shards: Sequence[Shard], world: World) -> tuple[HopSize, ...]:
        """One."""
        return (HopSize(sent.once.dim, _EVERYBODY, _own_batch(sent.once.bytes, world.size)),)

    def arriving(self, shards: Sequence[Shard], world: World) -> list[Columns]:
        """Everything."""
        return _once(shards)


# Columns


def _by_rank(shards: Sequence[Shard], world: World) -> list[list[Columns]]:
    """Columns of the tables and column blocks that are on one rank each."""
    found: list[list[Columns]] = [[] for _ in range(world.size)]
    for shard in shards:
        found[shard.rank] += shard.output_columns
    return found


def _once(shards: Sequence[Shard]) -> list[Columns]:
    """Columns that several ranks have a part of, or all of."""
    return list(dict.fromkeys(column for shard in shards for column in shard.output_columns))


# What is sent


def _all_to_all(
    sent_bytes: int, arriving_bytes: int, ranks: int, *, across_hosts: bool = False
) -> tuple[Collective, ...]:
    """Pooled rows of all ranks' samples; the gradients of this rank's samples come back. Sizes are those of a row."""
    if ranks == 1:
        return ()
    part = ranks if across_hosts else 0
    return (
        Collective("all_to_all", ranks * BATCH * sent_bytes, False, part, across_hosts),
        Collective("all_to_all", BATCH * arriving_bytes, True, part, across_hosts),
    )


def _reduce_scatter(row_bytes: int, ranks: int, counterparts: int = 1) -> tuple[Collective, ...]:
    """Parts of sums for the samples of ``ranks`` times ``counterparts`` ranks."""
    if ranks == 1 or not row_bytes:
        return ()
    own, part = counterparts * BATCH * row_bytes, ranks if counterparts > 1 else 0
    return (
        Collective("reduce_scatter", ranks * own, False, part),
        Collective("all_gather", own, True, part),
    )


def _own_batch(row_bytes: int, ranks: int) -> tuple[Collective, ...]:
    """Nothing; but the gradients of this rank's samples go to all ranks."""
    if ranks == 1:
        return ()
    return (Collective("all_gather", BATCH * row_bytes, backward=True),)
