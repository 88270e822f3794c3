"""How the pooled rows of sharded tables travel back to the ranks that own the samples, and what it costs.

``B`` is the batch size of a rank, the same on all ranks; bytes are those of the tables' outputs. Backwards are also
collectives, in which the modules of ``output_dist_start`` average gradients over ranks, as TorchRec's do. This is data
alone: ``recfx.runtime.output_dist`` makes the modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import sympy

from recfx.ir.meta import BATCH, WORLD, Collective
from recfx.ir.shard import Shard
from recfx.ir.tables import Columns, total_bytes, total_dim


class RowSize(NamedTuple):
    """The width of a row: its columns, and its bytes."""

    dim: int = 0
    bytes: int = 0

    def plus(self, other: RowSize) -> RowSize:
        """A row that holds both."""
        return RowSize(self.dim + other.dim, self.bytes + other.bytes)


@dataclass(frozen=True)
class SentRows:
    """The rows of some tables that travel back in the same way.

    Args:
        by_rank: the columns that each rank has, a part of or all of.
        by_host: the columns that each host has; those that several of its ranks have are counted once. Empty if hosts
            do not matter, because rows are not first summed within them.
        once: the columns of all tables.
    """

    by_rank: tuple[RowSize, ...]
    by_host: tuple[RowSize, ...]
    once: RowSize

    @classmethod
    def of(cls, shards: Sequence[Shard], world_size: int, local_size: int) -> SentRows:
        """The rows of ``shards``.

        Args:
            shards: those of all ranks.
            world_size: the number of ranks.
            local_size: the number of ranks per host.
        """
        by_rank, hosts = [RowSize()] * world_size, world_size // local_size if local_size > 1 else 0
        blocks: dict[tuple[str, tuple[int, int]], RowSize] = {}
        of_hosts: list[dict[tuple[str, tuple[int, int]], RowSize]] = [{} for _ in range(hosts)]
        for shard in shards:
            block = (shard.table.name, shard.columns)
            size = blocks.get(block)
            if size is None:
                size = blocks[block] = RowSize(total_dim(shard.output_columns), total_bytes(shard.output_columns))
            by_rank[shard.rank] = by_rank[shard.rank].plus(size)
            if hosts:
                of_hosts[shard.rank // local_size][block] = size
        return cls(tuple(by_rank), tuple(_sum(found.values()) for found in of_hosts), _sum(blocks.values()))

    @classmethod
    def together(cls, parts: Sequence[SentRows]) -> SentRows:
        """The rows of several tables."""
        if len(parts) == 1:
            return parts[0]
        by_rank = tuple(_sum(sizes) for sizes in zip(*(part.by_rank for part in parts), strict=True))
        by_host = tuple(_sum(sizes) for sizes in zip(*(part.by_host for part in parts), strict=True))
        return cls(by_rank, by_host, _sum(part.once for part in parts))


def _sum(sizes: Iterable[RowSize]) -> RowSize:
    dims = row_bytes = 0
    for size in sizes:
        dims, row_bytes = dims + size.dim, row_bytes + size.bytes
    return RowSize(dims, row_bytes)


class World(NamedTuple):
    """One rank among all ranks.

    Args:
        rank: this rank.
        size: the number of ranks.
    """

    rank: int
    size: int


@dataclass(frozen=True)
class Hop:
    """One ``output_dist_start`` with its ``output_dist_wait``, as one rank sees it.

    Args:
        operation: what sends the rows, by the name that ``recfx.runtime.output_dist`` knows it by.
        group: which ranks take part, by the name of the field of ``recfx.runtime.dist_groups.DistGroups``.
        columns: the columns that this rank sends, in order.
        samples: the symbolic number of rows that it sends.
        collectives: its collective calls in the forward and the backward, with their bytes.
        dims: how many columns each rank of the group sends; empty if all send the same.
        hosts: how many hosts the samples are of, if the group is that of one host; otherwise 1.
    """

    operation: str
    group: str
    columns: tuple[Columns, ...]
    samples: sympy.Expr
    collectives: tuple[Collective, ...]
    dims: tuple[int, ...] = ()
    hosts: int = 1


class HopSize(NamedTuple):
    """How much one hop sends, without the columns that it sends.

    Args:
        dim: the number of columns that the rank sends.
        samples: the symbolic number of rows.
        collectives: as in :class:`Hop`.
    """

    dim: int
    samples: sympy.Expr
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class WayBack(ABC):
    """One way back. Tables whose ways back are equal share one ``output_dist``.

    Args:
        local_size: the number of ranks per host, if rows are first summed within hosts; otherwise 1.

    Attributes:
        name: its name in reports.
        place: every rank goes through the ways back of a collection by ascending place; in different orders, ranks
            would wait for each other forever.
        wording: what happens to pooled rows, in a few words, for reports.
        hop_count: how many hops there are.
    """

    name: ClassVar[str]
    place: ClassVar[int]
    wording: ClassVar[str]
    hop_count: ClassVar[int] = 1
    local_size: int = 1

    @abstractmethod
    def hops(self, shards: Sequence[Shard], world: World) -> tuple[Hop, ...]:
        """What a rank sends in each of the ``hop_count`` hops; the first one takes what the lookups have pooled.

        All ranks, even those without a shard, have the same number of hops, with their collectives in the same order.

        Args:
            shards: the shards on all ranks of the tables that travel back this way.
            world: the rank for which to answer.
        """

    @abstractmethod
    def arriving(self, shards: Sequence[Shard], world: World) -> list[Columns]:
        """The columns that a rank gets for its own samples, after the last hop."""

    def hop_sizes(self, sent: SentRows, shards: Sequence[Shard], world: World) -> tuple[HopSize, ...]:
        """How much a rank sends, hop by hop: the sizes of what :meth:`hops` returns.

        A way back that answers from ``sent`` alone can be asked for a thousand ranks; this answer looks at all shards.

        Args:
            sent: how wide the rows are that each rank sends.
            shards: as for :meth:`hops`.
            world: the rank for which to answer.
        """
        return tuple(
            HopSize(total_dim(list(hop.columns)), hop.samples, hop.collectives) for hop in self.hops(shards, world)
        )


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
