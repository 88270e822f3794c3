"""Where the parts of one table are, as data."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.ir.shards import CollectionSharding, ShardedTable


@dataclass(frozen=True)
class ShardReport:
    """A rectangle of a table on one rank.

    Args:
        rank: the rank that has it.
        rows: first row and the row after the last; the two are equal if the rank gets no rows.
        columns: first column and the column after the last.
        bytes: size of its weights.
    """

    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    bytes: int


@dataclass(frozen=True)
class ShardingReport:
    """One table on several ranks, as one of them sees it.

    Args:
        sharding_type: one of TorchRec's.
        compute_kernel: ``"fused"`` or ``"dense"``.
        group: how its pooled rows are sent: ``"table_wise"`` (all-to-all), ``"row_wise"`` (sums over all ranks),
            ``"table_row_wise"`` (sums within a host, then all-to-all across hosts) or ``"data_parallel"`` (not at all).
        travels: the same in words.
        is_replicated: whether every rank has all of the table.
        rank: this rank.
        world_size: number of ranks.
        shards: all shards, by columns, then by rows.
        rows_here: number of rows of which this rank has some columns.
        columns_here: number of columns that it has of these rows.
        bytes_here: size of this rank's weights.
    """

    sharding_type: str
    compute_kernel: str
    group: str
    travels: str
    is_replicated: bool
    rank: int
    world_size: int
    shards: tuple[ShardReport, ...]
    rows_here: int
    columns_here: int
    bytes_here: int

    @classmethod
    def of(cls, table: ShardedTable, sharding: CollectionSharding, element_bytes: int) -> ShardingReport:
        """One table of ``sharding``; ``element_bytes`` is the size of one weight."""
        shards = tuple(
            ShardReport(shard.rank, shard.rows, shard.columns, _area(shard.rows, shard.columns) * element_bytes)
            for shard in table.shards
        )
        here = [shard for shard in shards if shard.rank == sharding.rank and shard.bytes]
        return cls(
            sharding_type=table.type.name,
            compute_kernel=table.compute_kernel,
            group=table.way_back.name,
            travels=table.way_back.wording,
            is_replicated=table.is_replicated,
            rank=sharding.rank,
            world_size=sharding.world_size,
            shards=shards,
            rows_here=max((shard.rows[1] - shard.rows[0] for shard in here), default=0),
            columns_here=sum(shard.columns[1] - shard.columns[0] for shard in here),
            bytes_here=sum(shard.bytes for shard in here),
        )


def _area(rows: tuple[int, int], columns: tuple[int, int]) -> int:
    return (rows[1] - rows[0]) * (columns[1] - columns[0])
