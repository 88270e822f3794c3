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

from recfx.errors import OutOfStepError
from recfx.nodes import marks
from recfx.sharding.context import BatchContext

_log = logging.getLogger("recfx")


class Sender(Protocol):
    """The collection that sends ids.

    Attributes:
        collection: fully qualified name in the model.
    """

    collection: str

    @property
    def sent_by_pipeline(self) -> bool:
        """Whether one of TorchRec's pipelines sends its ids."""

    def send_nothing(self, ctx: BatchContext) -> Any:
        """Take part in an exchange without ids; ``ctx.says`` tells the other ranks why."""


class _Call(NamedTuple):
    of: Sender
    ctx: BatchContext
    turn: object  # the calls of one batch are started in one turn, before any of them is run


class CallsUnderWay:
    """The calls of a process group that were started but have not run yet, in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._started: list[tuple[weakref.ref[Any], weakref.ref[BatchContext], object]] = []
        self._turn = object()
        self._sent: Any = None  # what the others may still be receiving

    def refuse(self, of: Sender) -> None:
        """Call this before a batch is started.

        Raises:
            OutOfStepError: ``data_ended``: other ranks do not have the batch before it.
        """
        for call in self._pending():
            if call.of is of and marks.any_of(call.ctx.marks, marks.ENDED):
                raise _ended(call)

    def start(self, of: Sender, ctx: BatchContext) -> None:
        """Note that a batch was started."""
        self._started.append((weakref.ref(of), weakref.ref(ctx), self._turn))

    def run(self, of: Sender, ctx: BatchContext) -> None:
        """Call this before a started batch is run. Collective if no batch of this collection follows it.

        Raises:
            OutOfStepError: ``data_ended``: other ranks do not have this batch.
        """
        pending = self._pending()
        self._started = [(weakref.ref(c.of), weakref.ref(c.ctx), c.turn) for c in pending if c.ctx is not ctx]
        self._turn = object()
        (mine,) = (call for call in pending if call.ctx is ctx)
        if not of.sent_by_pipeline or self._group.size() == 1:
            return
        if marks.any_of(ctx.marks, marks.ENDED):
            raise _ended(mine)
        # A pipeline that starts every batch only when it runs it (TorchRec's "Lite" one) seems to end with every batch
        # and pays for the exchange; it cannot be told apart from one that gets its data one batch at a time.
        is_followed = any(call.of is of and call.ctx is not ctx for call in pending)
        if not is_followed and not ctx.is_last:
            self._tell([call for call in pending if call.turn is mine.turn and call.of.sent_by_pipeline])

    def _tell(self, last: list[_Call]) -> None:
        """Take part in the exchange of sizes after that of the last batch; all its collections share it."""
        requests, contexts = [], []
        for call in last:
            call.ctx.is_last = True
            contexts.append(BatchContext(says=marks.ENDED))
            requests.append(call.of.send_nothing(contexts[-1]))
        self._sent = FusedKJTListSplitsAwaitable(requests, contexts, self._group).wait()
        ended = marks.ranks_with(contexts[0].marks, marks.ENDED)
        if len(ended) < self._group.size():
            _log.warning("%s", marks.data_ended(ended, after=f" after {last[0].ctx.number} batches"))

    def _pending(self) -> list[_Call]:
        found = [(of(), ctx(), turn) for of, ctx, turn in self._started]
        return [_Call(of, ctx, turn) for of, ctx, turn in found if of is not None and ctx is not None]


def _ended(call: _Call) -> OutOfStepError:
    ranks = marks.ranks_with(call.ctx.marks, marks.ENDED)
    return marks.data_ended(ranks, call.of.collection, f" after {call.ctx.number - 1} batches")


_under_way: weakref.WeakKeyDictionary[dist.ProcessGroup, CallsUnderWay] = weakref.WeakKeyDictionary()


def calls_under_way(group: dist.ProcessGroup) -> CallsUnderWay:
    """Those of one process group."""
    if group not in _under_way:
        _under_way[group] = CallsUnderWay(group)
    return _under_way[group]
