"""What one batch carries through a sharded collection, between the calls of TorchRec's ``ShardedModule``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.streamable import Multistreamable

from recfx.collections.sharding.pipeline_stages import Stages
from recfx.runtime.dist_context import DistContext
from recfx.runtime.streams import record_stream


@dataclass
class BatchContext(Multistreamable):
    """Values that cross the cuts of a collection's graph, by node name.

    Attributes:
        sharding_contexts: where TorchRec's awaitables write batch sizes; the objects on the graph's edges.
        says: what this rank tells the others along with its ids, as bits of ``marks``.
        refused: why this rank has no ids for this call.
        number: number of the batch in one of TorchRec's pipelines, from 1.
        stages: the form of the graph that this batch runs through; None until it is chosen.
        is_last: whether this rank's data ends with this batch and the others were told so.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sharding_contexts: list[DistContext] = field(default_factory=list)
    says: int = 0
    refused: Exception | None = None
    number: int = 0
    is_last: bool = False
    stages: Stages | None = None

    @property
    def marks(self) -> list[int]:
        """The marks of all ranks; none before the sizes of the ids have arrived."""
        return self.sharding_contexts[0].output_splits if self.sharding_contexts else []

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the values that cross a cut alive for ``stream``."""
        for value in self.values.values():
            if isinstance(value, (torch.Tensor, Multistreamable)):
                record_stream(value, stream)
