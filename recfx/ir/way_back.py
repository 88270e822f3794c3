"""What defines a way back: how the pooled rows of sharded tables travel back to the ranks that own the samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import sympy

from recfx.ir.columns import Columns, total_dim
from recfx.ir.meta import Collective
from recfx.ir.sent_rows import SentRows
from recfx.ir.shard import Shard


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
