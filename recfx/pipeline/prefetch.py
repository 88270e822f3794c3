"""Which calls of a model can be started ahead, learned from its first batch, and how the model gets their results."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from recfx.collections.collection import unsharded_collections
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.sharding.collection import ShardedCollection, sharded_collections
from recfx.collections.wrappers import users_path
from recfx.errors import Diagnostic
from recfx.pipeline.background import Streams, Worker
from recfx.pipeline.batch_paths import Versions
from recfx.pipeline.prefetched_call import (
    HashedCall,
    KnownCall,
    StartedCall,
    batch_changed,
    hashed_on_host,
    joint_exchanges,
)

_log = logging.getLogger("recfx")
_STOCK = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


@dataclass(frozen=True)
class PipelinedCollection:
    """What a pipeline does with one collection."""

    path: str
    pipelined: bool  # whether its ids are sent ahead or, if this rank has the whole collection, hashed ahead
    why: Diagnostic | None = None  # why they are not, or what else is not done ahead


class CallsAhead:
    """The calls of a model's collections, for several batches at once."""

    def __init__(self, model: nn.Module, streams: Streams) -> None:
        self._model, self._streams, self._worker = model, streams, Worker()
        self._hashed = hashed_on_host(model)
        self._modules: dict[str, Any] = {**sharded_collections(model), **self._hashed}
        self._known: list[KnownCall] | None = None
        self._not_ahead: dict[str, Diagnostic] = {}

    def start(self, batch: Any, is_last: bool) -> list[StartedCall] | None:
        """Start the calls of a batch; None if the model has not run yet. Collective, like all of these methods.

        This includes calls after one that the batch does not fit, because ranks whose batches fit start them, too.
        """
        if self._known is None:
            return None
        started = [
            (HashedCall if call.name in self._hashed else StartedCall)(call, call.arguments(batch))
            for call in self._known
        ]
        exchanges = joint_exchanges(started)
        with self._in_step():
            for call in started:
                call.start(self._streams, is_last, exchanges.get(call))
            with self._streams.on(self._streams.ids):
                for exchange in dict.fromkeys(exchanges.values()):
                    exchange.start()
        return started

    def send(self, started: list[StartedCall] | None, *, finds_rows: bool = True) -> bool | None:
        """Send the ids of a batch that was started; whether all ranks have another one, None if that is not known.
        ``finds_rows``: whether no earlier batch changes the indexes any more, so that rows can be found ahead.
        """
        with self._in_step():
            for call in started or ():
                call.send(self._streams, self._worker, finds_rows=finds_rows)
        known = [call.has_next for call in started or () if call.has_next is not None]
        return all(known) if known else None

    def _in_step(self) -> AbstractContextManager[None]:
        """Treat Ctrl-C between these collective calls as an interrupt in the middle of a step."""
        ours = [module for module in self._modules.values() if isinstance(module, ShardedCollection)]
        return ours[0].in_step if ours else nullcontext()

    @contextmanager
    def given(self, batch: Any, started: list[StartedCall] | None, next: list[StartedCall] | None) -> Iterator[None]:
        """Within this context, collections use what was ``started`` for this batch; calls are learned from the first
        batch, for which it is None. ``next`` was started for the batch after it. A model that is called outside of it,
        between the steps of a pipeline, is not affected.
        """
        before = {path: module.__dict__.get("forward") for path, module in self._modules.items()}
        originals = {path: module.forward for path, module in self._modules.items()}
        calls: list[tuple[str, KnownCall | None]] = []
        waiting: dict[str, deque[StartedCall]] = {path: deque() for path in self._modules}
        for call in started or ():
            waiting[call.call.name].append(call)
        learning, versions = started is None, Versions(batch)

        def noting(path: str, module: Any) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                changed = versions.changed((args, kwargs))
                calls.append((path, None if changed else KnownCall.find(path, module, batch, args, kwargs)))
                return originals[path](*args, **kwargs)

            return forward

        for path, module in self._modules.items():
            if learning:
                module.forward = noting(path, module)
            else:
                module.forward = self._taking(path, originals[path], versions, waiting, next)
        try:
            yield
        finally:
            for path, module in self._modules.items():
                del module.forward
                if before[path] is not None:
                    module.forward = before[path]
        if learning and self._known is None:
            self._learn(calls)

    def report(self) -> list[PipelinedCollection]:
        """What is done with each collection."""
        collections = [self._of(path, module) for path, module in self._modules.items()]
        why = "this rank has the whole collection, so there are no ids to send."
        whole = [path for path in unsharded_collections(self._model) if path not in self._hashed]
        reasons = [Diagnostic("not_sharded", path, why) for path in whole]
        why = "it is TorchRec's own, which sends its ids when the model calls it."
        stock = (path for path, module in self._model.named_modules() if type(module) in _STOCK)
        reasons += [Diagnostic("not_converted", users_path(self._model, path), why) for path in stock]
        return collections + [PipelinedCollection(reason.path, False, reason) for reason in reasons]

    def agree(self, is_on_any_rank: Callable[[bool], bool]) -> None:
        """Keep out what any rank has kept out: its first batch may have had no such part. Collective."""
        for path in sharded_collections(self._model):
            if is_on_any_rank(path in self._not_ahead) and path not in self._not_ahead:
                why = "with its first batch, another rank did not call it with a part of the batch."
                self._keep_out(Diagnostic("not_ahead_on_another_rank", path, why))

    def _learn(self, calls: list[tuple[str, KnownCall | None]]) -> None:
        called = {path for path, _ in calls}
        for path in self._modules:
            if path not in called:
                self._keep_out(Diagnostic("not_called", path, "the model did not call it with its first batch."))
        for path, call in calls:
            if call is None:
                why = "the model computes or changes its input, but only what is in the batch is known in advance."
                self._keep_out(Diagnostic("input_not_in_batch", path, why))
        self._known = [call for path, call in calls if call is not None and path not in self._not_ahead]

    def _keep_out(self, why: Diagnostic) -> None:
        self._not_ahead[why.path] = why
        _log.warning("collection %r is not pipelined [%s]: %s", why.path, why.code, why.message)
        self._known = [call for call in self._known or () if call.name != why.path]

    def _taking(
        self,
        path: str,
        original: Callable[..., Any],
        versions: Versions,
        waiting: dict[str, deque[StartedCall]],
        next: list[StartedCall] | None,
    ) -> Callable[..., Any]:
        mine, in_next = waiting[path], any(call.call.name == path for call in next or ())

        def forward(*args: Any, **kwargs: Any) -> Any:
            if mine and (mine[0].is_for(args, kwargs) or mine[0].is_refused):
                if versions.changed((args, kwargs)) and not mine[0].is_refused:
                    raise batch_changed("its ids had been sent or hashed ahead when the model changed them", path)
                call = mine.popleft()
                return original(*args, **kwargs) if call.is_outdated() else call.finish(self._streams)
            if path not in self._not_ahead:
                why = "the model called it differently than with the first batch."
                self._keep_out(Diagnostic("input_changed", path, why))
            # The next batch's sizes are on their way, and its ids come next: if only this rank makes the call, or all
            # others do, nobody must read its sizes as those ids.
            self.send(next, finds_rows=not (in_next or any(waiting.values())))
            return original(*args, **kwargs)

        return forward

    def _of(self, path: str, module: Any) -> PipelinedCollection:
        if path in self._not_ahead:
            return PipelinedCollection(path, False, self._not_ahead[path])
        if self._known is None:
            why = "calls are learned from the first batch."
            return PipelinedCollection(path, False, Diagnostic("no_batch_yet", path, why))
        tables = module.tables if isinstance(module, ConvertedCollection) else ()
        in_turn = [table.name for table in tables if table.evicts or table.admits]
        if in_turn:
            done = "copied to the host" if path in self._hashed else "sent"
            why = f"its ids are {done} ahead but hashed in turn, because tables {in_turn} count every id or evict."
            return PipelinedCollection(path, True, Diagnostic("hashed_in_turn", path, why))
        return PipelinedCollection(path, True)
