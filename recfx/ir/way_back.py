"""How the pooled rows of sharded tables travel back to the ranks whose samples they are: what each way must say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import sympy
from torch import nn

from recfx.ir.columns import Columns
from recfx.ir.meta import Collective
from recfx.ir.shard import Shard


class World(NamedTuple):
    """One rank among others.

    Args:
        rank: this one.
        size: number of ranks.
    """

    rank: int
    size: int


@dataclass(frozen=True)
class Hop:
    """One ``output_dist_start`` with its ``output_dist_wait``, as one rank sees it.

    Args:
        columns: what this rank sends, in order.
        samples: rows of what it sends, symbolically.
        collectives: what it puts on the wire, forwards and backwards, in bytes.
        start: makes the module of ``output_dist_start``. Its arguments: the process groups of the collection, the
            columns of each input, and the device of the pooled rows.
    """

    columns: tuple[Columns, ...]
    samples: sympy.Expr
    collectives: tuple[Collective, ...]
    start: Callable[..., nn.Module]


@dataclass(frozen=True)
class WayBack(ABC):
    """One way. Tables whose ways are equal share one ``output_dist``.

    Args:
        local_size: ranks of a host, where rows are summed inside hosts first; else 1.

    Attributes:
        name: of the way in reports.
        place: every rank goes through the ways of a collection by ascending place, or ranks would wait for each other.
        wording: what happens to pooled rows, in a few words, for reports.
    """

    name: ClassVar[str]
    place: ClassVar[int]
    wording: ClassVar[str]
    local_size: int = 1

    @abstractmethod
    def hops(self, shards: Sequence[Shard], world: World) -> tuple[Hop, ...]:
        """What a rank sends, hop after hop; at least one, the first of which takes what the lookups have pooled.

        All ranks have the same number of hops, and their collectives in the same order, also those without a shard.

        Args:
            shards: of all ranks, of the tables that travel this way.
            world: the rank that asks.
        """

    @abstractmethod
    def arriving(self, shards: Sequence[Shard], world: World) -> list[Columns]:
        """The columns that a rank gets for its own samples, after the last hop."""
