"""On which rank a plan places a shard."""

from __future__ import annotations

from torch.distributed._shard.metadata import ShardMetadata


def rank_of(shard: ShardMetadata) -> int | None:
    """The rank of a shard's placement; None if it names no rank, such as ``cpu``."""
    rank = getattr(shard.placement, "rank", None)
    found = rank() if callable(rank) else None
    return None if found is None else int(found)
