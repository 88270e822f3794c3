"""The end of one rank's data under TorchRec's pipelines, which know nothing about the other ranks' data.

``TrainPipelineSparseDist`` sends the ids of the next batch before it runs a batch. A rank that has no next batch would
send nothing, while the others wait for it in the middle of their step. So if a rank's collection runs a batch before
the next one was started, the rank takes part in that exchange without ids, and with a mark that says so. It runs its
last step, and so do the others, which raise ``data_ended`` when the step after that begins.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torchrec.distributed.embedding_sharding import FusedKJTListSplitsAwaitable

from recfx.collections.sharding.awaitables import BatchContext
from recfx.errors import OutOfStepError
from recfx.runtime import marks
from recfx.runtime.input_dist import DistContext

_log = logging.getLogger("recfx")


class Sender(Protocol):
    """The collection that sends ids.

    Attributes:
        collection: fully qualified name in the model.
    """

    collection: str

    @property
    def pipeline(self) -> object | None:
        """What one of TorchRec's pipelines has put in its place to send ids, an object of its own; None if none has."""

    def send_nothing(self, ctx: BatchContext) -> Any:
        """Take part in an exchange without ids; ``ctx.says`` tells the other ranks why."""


class _Call(NamedTuple):
    of: weakref.ref[Any]  # a model may go while a batch is under way
    pipeline: object | None
    ctx: weakref.ref[BatchContext]
    number: int
    sharding_contexts: list[DistContext]  # they hold the marks, whether anybody keeps the batch or not
    turn: object  # the calls of one batch are started in one turn, before any of them is run

    def is_from(self, of: Sender) -> bool:
        """Whether it is a call of this collection that the pipeline of now may still run. A pipeline's first batch is
        started before the pipeline takes its place.
        """
        return self.of() is of and self.pipeline in (None, of.pipeline)

    @property
    def marks(self) -> list[int]:
        return self.sharding_contexts[0].output_splits if self.sharding_contexts else []

    @property
    def may_run(self) -> bool:
        """Whether it may still be run, or tells something about those that may."""
        of = self.of()
        tells = self.pipeline is not None and of is not None and self.pipeline is of.pipeline
        return of is not None and (tells or self.ctx() is not None)


class CallsUnderWay:
    """The calls of a process group that were started but have not run yet, in order.

    What follows from them follows from the order of calls, and not from which of them somebody still keeps: a pipeline
    that was given up may live on for one rank alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._started: list[_Call] = []
        self._turn = object()
        self._sent: Any = None  # what the others may still be receiving

    def refuse(self, of: Sender) -> None:
        """Call this before a batch is started.

        Raises:
            OutOfStepError: ``data_ended``: other ranks do not have the batch before it.
        """
        for call in self._started:
            if call.is_from(of) and marks.any_of(call.marks, marks.ENDED):
                raise _ended(call, of)

    def start(self, of: Sender, ctx: BatchContext) -> None:
        call = _Call(weakref.ref(of), of.pipeline, weakref.ref(ctx), ctx.number, ctx.sharding_contexts, self._turn)
        self._started.append(call)

    def run(self, of: Sender, ctx: BatchContext) -> None:
        """Call this before a started batch is run. Collective if no batch of this collection follows it.

        Raises:
            OutOfStepError: ``data_ended``: other ranks do not have this batch.
        """
        (position,) = (number for number, call in enumerate(self._started) if call.ctx() is ctx)
        mine, after = self._started[position], self._started[position + 1 :]
        before = self._started[:position]
        self._started = [call for call in (*before, *after) if call.may_run]
        self._turn = object()
        if of.pipeline is None or self._group.size() == 1:
            return
        if marks.any_of(mine.marks, marks.ENDED):
            raise _ended(mine, of)
        # A pipeline that starts every batch only when it runs it (TorchRec's "Lite" one) seems to end with every batch
        # and pays for the exchange; it cannot be told apart from one that gets its data one batch at a time.
        is_followed = any(call.of() is of and call.pipeline is of.pipeline for call in after)
        if not is_followed and not ctx.is_last:
            self._tell([call for call in (*before, mine, *after) if call.turn is mine.turn])

    def _tell(self, last: list[_Call]) -> None:
        """Take part in the exchange of sizes after that of the last batch; all its collections share it."""
        requests, contexts = [], []
        for call in last:
            of, ctx = call.of(), call.ctx()
            if of is None or ctx is None or of.pipeline is None:
                continue
            ctx.is_last = True
            contexts.append(BatchContext(says=marks.ENDED))
            requests.append(of.send_nothing(contexts[-1]))
        self._sent = FusedKJTListSplitsAwaitable(requests, contexts, self._group).wait()
        ended = marks.ranks_with(contexts[0].marks, marks.ENDED)
        if len(ended) < self._group.size():
            _log.warning("%s", marks.data_ended(ended, after=f" after {last[0].number} batches"))


def _ended(call: _Call, of: Sender) -> OutOfStepError:
    ranks = marks.ranks_with(call.marks, marks.ENDED)
    return marks.data_ended(ranks, of.collection, f" after {call.number - 1} batches")


_under_way: weakref.WeakKeyDictionary[dist.ProcessGroup, CallsUnderWay] = weakref.WeakKeyDictionary()


def calls_under_way(group: dist.ProcessGroup) -> CallsUnderWay:
    """The calls under way in one process group."""
    if group not in _under_way:
        _under_way[group] = CallsUnderWay(group)
    return _under_way[group]
