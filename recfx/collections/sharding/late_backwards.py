"""Backwards that come too late, in collections that are sharded: all ranks refuse them, or none does.

The rank that has given rows of a batch to other ids knows that the batch can no longer be trained; the others would
wait for it in the backward's collectives. So before a backward that may be too late, ranks tell each other. Whether it
may be follows from the number of forwards since, which is the same on all of them: a backward in time costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable

from recfx.collections.sharding.ranks_agree import any_rank_each
from recfx.runtime.in_flight import BatchesInFlight, BatchInFlight, backward_after_eviction
from recfx.runtime.input_dist import DistContext


class LateBackwards:
    """Watches the backwards of one sharded collection with indexes and, if any table evicts, counts its forwards.

    Args:
        tables: the names of those that evict, on whichever rank.
    """

    def __init__(
        self, collection: str, group: dist.ProcessGroup, tables: Sequence[str], in_flight: BatchesInFlight
    ) -> None:
        self._collection, self._group, self.in_flight = collection, group, in_flight
        self._tables = list(tables)

    def watch(self, started: Awaitable[torch.Tensor], context: DistContext, training: bool) -> Awaitable[torch.Tensor]:
        """What ``started`` gives, with a backward that is refused if it comes too late.

        Args:
            started: an ``output_dist_start`` of the forward that is under way.
            training: whether the forward may evict ids.
        """
        if not self._tables or not (training or torch.is_grad_enabled()):
            return started
        backward = context.backward
        if backward is None:
            in_flight = self.in_flight
            backward = context.backward = _Backward(self, in_flight.latest, in_flight.kept_until + 1)
            in_flight.turn += 1
        return _Watched(started, backward)

    def refuse(self, batch: BatchInFlight | None) -> None:
        """Raise on all ranks if any of them has lost rows of this batch. Collective.

        Raises:
            InputError: ``backward_after_eviction``.
        """
        here = [] if batch is None else batch.lost()
        lost = any_rank_each(self._group, [table in here for table in self._tables])
        tables = [table for table, is_lost in zip(self._tables, lost, strict=True) if is_lost]
        if tables:
            raise backward_after_eviction(self._collection, tables)


class _Backward:
    """The backwards of one batch, each of which arrives here once per way back, before any of its collectives.

    After ``free_after`` forwards, ids may be evicted that the batch has used.
    """

    def __init__(self, late: LateBackwards, batch: BatchInFlight | None, free_after: int) -> None:
        self._late, self._batch, self._free_after = late, batch, free_after
        self._running = -1  # torch's number of the last backward

    def __call__(self, *gradients: Any) -> None:
        running = torch._C._current_graph_task_id()
        if running == self._running:
            return
        self._running = running
        forwards = self._late.in_flight.turn
        if forwards > self._free_after:
            self._late.refuse(self._batch)
        self._free_after = min(self._free_after, forwards)


class _Watched(Awaitable[torch.Tensor]):
    def __init__(self, started: Awaitable[torch.Tensor], backward: Callable[..., None]) -> None:
        super().__init__()
        self._started, self._backward = started, backward

    def _wait_impl(self) -> torch.Tensor:
        arrived = self._started.wait()
        if arrived.grad_fn is not None:
            arrived.grad_fn.register_prehook(self._backward)
        return arrived
