"""Calls that run ahead of the model: ids are sent, or hashed on the host, while an earlier batch computes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch import fx, nn

from recfx.collections.collection import UnshardedCollection, unsharded_collections
from recfx.collections.sharding.collection import Result, ShardedCollection, Stages
from recfx.errors import InputError, OutOfStepError
from recfx.pipeline.background import Streams, Worker
from recfx.pipeline.batch_paths import Path, follow, path_in
from recfx.runtime import marks
from recfx.runtime.find_rows import FindRows
from recfx.runtime.input_dist import Exchange
from recfx.runtime.transfers import ToHost


class KnownCall:
    """A call whose arguments are parts of the batch; ``args`` and ``kwargs`` say where they are in it."""

    def __init__(self, name: str, module: Any, args: list[Path], kwargs: dict[str, Path]) -> None:
        self.name, self.module, self.args, self.kwargs = name, module, args, kwargs
        self._cut: Stages | None = None

    @classmethod
    def find(
        cls, name: str, module: Any, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> KnownCall | None:
        """The call that was made with these arguments; None if some of them are not part of the batch."""
        places: list[Any] = [path_in(batch, arg) for arg in args]
        named: dict[str, Any] = {key: path_in(batch, arg) for key, arg in kwargs.items()}
        return None if None in [*places, *named.values()] else cls(name, module, places, named)

    def arguments(self, batch: Any) -> tuple[list[Any], dict[str, Any]] | None:
        """The arguments for another batch; None if it has no such parts."""
        try:
            return [follow(batch, path) for path in self.args], {k: follow(batch, p) for k, p in self.kwargs.items()}
        except (AttributeError, LookupError, TypeError):
            return None

    def stages(self) -> Stages:
        """The stages of the collection's graph as it is now."""
        graph_module = self.module.graph_module
        if self._cut is None or self._cut.graph_module is not graph_module:
            self._cut = Stages(graph_module)
        return self._cut


class StartedCall:
    """One call for one batch, in flight: ``start``, ``send``, ``wait``, ``finish``, in this order.

    ``start`` and ``send`` start all collectives, on the caller's thread, so their order is the same on all ranks. An
    error in any of these is kept until ``finish``: it belongs to the batch, and is raised when the batch's turn comes.

    Args:
        arguments: its arguments for this batch; None if the batch has no such parts.
    """

    def __init__(self, call: KnownCall, arguments: tuple[list[Any], dict[str, Any]] | None) -> None:
        self.call, self._lacks_arguments = call, arguments is None
        self.args, self.kwargs = arguments or ([], {})
        self.error: Exception | None = None
        self._context: Any = None
        self._sizes: Any = None
        self._arrived: Future[Any] | None = None
        self._result: Any = None

    def start(self, streams: Streams, is_last: bool, exchange: Exchange | None = None) -> None:
        """Select the ids, and start telling the other ranks how many there are and whether this is the last batch.

        ``exchange``: where to add the ids instead, if they are sent along with those of other calls.
        """
        module = self.call.module
        try:
            with streams.on(streams.ids), module.sent_by(exchange):
                streams.take((self.args, self.kwargs), streams.copy)
                self._context = module.create_context()
                self._context.says = marks.AHEAD | (marks.LAST if is_last else 0)
                if self._lacks_arguments:  # other ranks may have such parts, and wait for this rank's ids
                    self._context.says |= marks.LACKS
                    lacks_part = InputError(
                        "this rank's batch has no such part as the collection was called with before, so no ids were "
                        "sent for it, and all ranks refuse the batch.",
                        reason="part_not_in_batch",
                        module_path=self.call.name,
                        what_to_do="give every batch that part; if there is nothing in it, a KeyedJaggedTensor without "
                        "ids. Ranks are still in step: all may go on with the next batch.",
                    )
                    self._sizes = module.refuse(self._context, lacks_part)
                else:
                    self._sizes = module.input_dist(self._context, *self.args, **self.kwargs)
        except Exception as error:
            self.error = error

    def send(self, streams: Streams, worker: Worker, *, finds_rows: bool = True) -> None:
        """Start sending the ids; the worker waits for those that arrive, and finds their rows if it may and can.

        Raises:
            OutOfStepError: ``ranks_at_different_calls``: some ranks have changed their mode since the batch before this
                one was sent, and run that batch in another mode than others. No rank sends more.
        """
        if self.error is not None or self._sizes is None:
            return
        module = self.call.module
        try:
            module.in_step.refuse_if_failed()
            with streams.on(streams.ids):
                ids = self._sizes.wait()
            self._sizes = None
            find_rows = module.prefetcher(self._context) if finds_rows else None
        except Exception as error:
            self.error = error
            if isinstance(error, OutOfStepError) and error.by_all_ranks:
                raise
            return

        def arrive() -> Any:
            streams.use_device()
            with streams.on(streams.ids):
                arrived = ids.wait()
                if find_rows is not None:
                    find_rows(arrived)
            return arrived

        self._arrived = worker.run(arrive)

    @property
    def has_next(self) -> bool | None:
        """Whether all ranks have a batch after this one; None if this call cannot tell."""
        if self.error is not None or self._context is None or not self._context.marks:
            return None
        return not marks.any_of(self._context.marks, marks.LAST)

    def wait(self) -> None:
        """Wait until the worker has finished with this call."""
        if self._arrived is not None:
            self._arrived.exception()

    def is_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the model makes the call with the very objects that were expected."""
        if len(args) != len(self.args) or kwargs.keys() != self.kwargs.keys():
            return False
        expected = [*self.args, *(self.kwargs[key] for key in kwargs)]
        return all(mine is theirs for mine, theirs in zip(expected, [*args, *kwargs.values()], strict=True))

    @property
    def is_refused(self) -> bool:
        """Whether all ranks know already that they refuse the call, whatever the model calls the collection with.

        If no rank has such a part in its batch, nothing was refused: all of them make the call as the model wants it.
        """
        if self._context is None:
            return False
        self.wait()  # what ranks say of each of several calls comes with the ids
        marks_of_ranks = self._context.marks
        all_lack = bool(marks_of_ranks) and all(mark & marks.LACKS for mark in marks_of_ranks)
        return not all_lack and (self.error is not None or marks.any_of(marks_of_ranks, marks.REFUSED))

    def is_outdated(self) -> bool:
        """Whether the call has to be made anew. What ranks have begun together, they finish."""
        return False

    def finish(self, streams: Streams) -> Any:
        """The rest of the call, in the model's forward. Returns its result, or raises what happened ahead or now."""
        if self.error is not None:
            raise self.error
        assert self._arrived is not None
        module = self.call.module
        module.in_step.refuse_if_failed()
        with module.in_step:  # the ids were exchanged: an error on the worker since then is in the middle of the step
            arrived = self._arrived.result()
        streams.take((arrived, self._context), streams.ids)
        self._result = module.compute_and_output_dist(self._context, arrived)
        return self._result

    @property
    def is_finished(self) -> bool:
        """Whether the model has the values of the result, so that other ranks wait for nothing of this forward."""
        return self._result.has_run if isinstance(self._result, Result) else self._result is not None


def joint_exchanges(started: Sequence[StartedCall]) -> dict[StartedCall, Exchange]:
    """The exchange of each call whose ids are sent along with those of other calls, in the same group of ranks."""
    of_group: dict[dist.ProcessGroup, list[StartedCall]] = {}
    for call in started:
        module = call.call.module
        if isinstance(module, ShardedCollection) and module.groups.ids.size() > 1:
            of_group.setdefault(module.groups.ids, []).append(call)
    exchanges: dict[StartedCall, Exchange] = {}
    for group, calls in of_group.items():
        if len(calls) > 1:
            exchanges.update(dict.fromkeys(calls, Exchange(group, [call.call.name for call in calls])))
    return exchanges


def batch_changed(how: str, path: str = "") -> InputError:
    """The error of a batch that was changed after its ids were sent or hashed ahead, or before it was run."""
    return InputError(
        f"a batch was changed in place before the model ran it: {how}.",
        reason="batch_changed",
        module_path=path,
        what_to_do="let the loader give every batch memory of its own, and the model change a copy of it "
        "(clone() the tensors first). The batch was not run.",
    )


def hashed_on_host(model: nn.Module) -> dict[str, UnshardedCollection]:
    """The unsharded collections that copy ids to the host to hash them, or those that have no row, by path."""
    return {
        path: collection
        for path, collection in unsharded_collections(model).items()
        if not collection.graph_is_inlined  # the model's graph calls the nodes one by one
        and any(
            node.op == "call_module"
            and isinstance(collection.graph_module.get_submodule(str(node.target)), (ToHost, FindRows))
            for node in collection.graph_module.graph.nodes
        )
    }


class HashedCall(StartedCall):
    """One call for one batch, whose ids are hashed ahead."""

    _graph: fx.GraphModule | None = None
    _stages: Stages

    def start(self, streams: Streams, is_last: bool, exchange: Exchange | None = None) -> None:
        """Nothing: no other rank takes part."""

    def send(self, streams: Streams, worker: Worker, *, finds_rows: bool = True) -> None:
        """Let the worker begin, if it may. Called on the thread that owns the indexes."""
        if self._lacks_arguments or self._graph is not None or not finds_rows:
            return
        stages = self._stages = self.call.stages()
        self._graph, find = stages.graph_module, stages.finder()
        (features,) = [*self.args, *self.kwargs.values()]
        values: dict[str, Any] = {"features": features}

        def work() -> tuple[dict[str, Any], bool]:
            streams.use_device()
            with streams.on(streams.ids):
                streams.take(features, streams.copy)
                stages.select.run(values)
                if find is not None:
                    stages.arrive.run(values)
                    find(values)
            return values, find is not None

        self._arrived = worker.run(work)

    def is_outdated(self) -> bool:
        """Whether the collection has another graph now, or nothing was begun."""
        self.wait()
        self.call.module.begin_forward()
        return self.call.module.graph_module is not self._graph

    def finish(self, streams: Streams) -> Any:
        """The rest of the call, in the model's forward. Returns its result, or raises what happened ahead or now."""
        assert self._arrived is not None
        values, rows_are_found = self._arrived.result()
        streams.take(values, streams.ids)
        if not rows_are_found:
            self._stages.arrive.run(values)
        self._stages.compute.run(values)
        self._stages.collect.run(values)
        self._result = values[self._stages.result]
        return self._result
