"""How wide the pooled rows are that ranks send, for all ranks at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from recfx.ir.columns import total_bytes, total_dim
from recfx.ir.shard import Shard


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
