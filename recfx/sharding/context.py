"""What one batch carries through a sharded collection, between the calls of TorchRec's ``ShardedModule``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.streamable import Multistreamable

from recfx.nodes.dist_context import DistContext


@dataclass
class BatchContext(Multistreamable):
    """Values that cross the cuts of a collection's graph, by node name.

    Attributes:
        sharding_contexts: where TorchRec's awaitables write batch sizes; the objects on the graph's edges.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sharding_contexts: list[DistContext] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep what crosses alive for ``stream``."""
        for value in self.values.values():
            if isinstance(value, (torch.Tensor, Multistreamable)):
                value.record_stream(stream)
