"""What ``output_dist`` must know about ``input_dist``: a value on an edge of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchrec.distributed.embedding_sharding import EmbeddingShardingContext


@dataclass
class DistContext(EmbeddingShardingContext):
    """The context of one collection and one batch. ``batch_size_per_rank`` is known once ids have arrived.

    TorchRec's pipelines wait for the ids themselves, and then fill it in like ``input_dist_wait``.

    Attributes:
        output_splits: the marks of all ranks (see ``marks``). TorchRec's awaitables fill in an attribute of this name.
        backward: called before each backward of the batch, if tables evict (see ``late_backwards``).
        asked: whether the ranks have told each other that the forward, which is a replay, can be run again.
    """

    output_splits: list[int] = field(default_factory=list)
    backward: Callable[..., None] | None = None
    asked: bool = False
