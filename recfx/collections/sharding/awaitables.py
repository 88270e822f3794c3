"""What a sharded collection keeps and returns while a batch is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import KJTListAwaitable, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.streamable import Multistreamable

from recfx.collections.sharding.pipeline_stages import Stage, Stages
from recfx.runtime.input_dist import DistContext
from recfx.runtime.out_of_step import InStep
from recfx.runtime.transfers import record_stream


@dataclass
class BatchContext(Multistreamable):
    """Values that cross the cuts of a collection's graph, by node name.

    Attributes:
        sharding_contexts: where TorchRec's awaitables write batch sizes; the objects on the graph's edges.
        says: what this rank tells the others along with its ids, as bits of ``marks``.
        refused: why this rank has no ids for this call.
        stages: the form of the graph that this batch runs through; None until its ids are sent.
        arrives_ahead: whether the stage that begins with arrived ids runs before ``compute``.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sharding_contexts: list[DistContext] = field(default_factory=list)
    says: int = 0
    refused: Exception | None = None
    stages: Stages | None = None
    arrives_ahead: bool = False

    @property
    def marks(self) -> list[int]:
        """The marks of all ranks; none before the sizes of the ids have arrived."""
        return self.sharding_contexts[0].output_splits if self.sharding_contexts else []

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the values that cross a cut alive for ``stream``."""
        for value in self.values.values():
            if isinstance(value, (torch.Tensor, Multistreamable)):
                record_stream(value, stream)


class Sending(KJTListSplitsAwaitable[BatchContext]):
    """Sizes in flight, and then ids, of what was started; other ranks wait if anything goes wrong here."""

    def __init__(self, started: list[Awaitable[Any]], ctx: BatchContext, in_step: InStep) -> None:
        super().__init__(started, ctx)
        self._in_step = in_step

    def _wait_impl(self) -> KJTListAwaitable:
        with self._in_step:
            arriving = super()._wait_impl()
        return _Arriving(arriving.awaitables, arriving.ctx, self._in_step)


class _Arriving(KJTListAwaitable):
    def __init__(self, awaitables: list[Awaitable[Any]], ctx: BatchContext, in_step: InStep) -> None:
        super().__init__(awaitables, ctx)
        self._in_step = in_step

    def _wait_impl(self) -> KJTList:
        with self._in_step:
            return super()._wait_impl()


class Result(LazyAwaitable[Any]):
    """The last stage of a graph, which has one output; it runs on the first wait, and later ones give the same."""

    def __init__(self, stage: Stage, values: dict[str, Any], in_step: InStep) -> None:
        super().__init__()
        self._stage, self._values, self._in_step = stage, values, in_step
        self.has_run = False

    def _wait_impl(self) -> Any:
        if not self.has_run:
            with self._in_step:
                self._stage.run(self._values)
            self.has_run = True
        (result,) = self._stage.outputs
        return self._values[result]
