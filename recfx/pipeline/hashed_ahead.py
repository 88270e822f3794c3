"""Calls of collections on this rank alone whose ids are hashed on the host, ahead of the model.

While an earlier batch computes on the device, the worker selects the ids, copies them to the host and, if that does not
change the results, finds their rows. Everything else is done in the batch's turn.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from torch import fx, nn

from recfx.collections.collection import UnshardedCollection, unsharded_collections
from recfx.collections.sharding.pipeline_stages import Stages
from recfx.ir.meta import node_meta
from recfx.pipeline.background import Streams, Worker
from recfx.pipeline.prefetched_call import StartedCall


def hashed_on_host(model: nn.Module) -> dict[str, UnshardedCollection]:
    """The unsharded collections that copy ids to the host to hash them, by path."""
    return {
        path: collection
        for path, collection in unsharded_collections(model).items()
        if not collection.graph_is_inlined  # the model's graph calls the nodes one by one
        and any((meta := node_meta(node)) and meta.kind == "to_host" for node in collection.graph_module.graph.nodes)
    }


class HashedCall(StartedCall):
    """One call for one batch, whose ids are hashed ahead."""

    _graph: fx.GraphModule | None = None
    _stages: Stages
    _hashed: Future[tuple[dict[str, Any], bool]] | None = None

    def start(self, streams: Streams, is_last: bool) -> None:
        """Nothing: no other rank takes part."""

    def send(self, streams: Streams, worker: Worker, *, finds_rows: bool = True) -> None:
        """Let the worker begin, if it may. Called on the thread that owns the indexes."""
        if self._lacks_arguments or self._graph is not None or not finds_rows:
            return
        module, staged = self.call.module, self.call.staged()
        finds = staged.prefetching.is_of_use
        stages = self._stages = staged.prefetching.stages if finds else staged.in_turn
        self._graph = module.graph_module
        (features,) = [*self.args, *self.kwargs.values()]
        values: dict[str, Any] = {"features": features}
        stages.snapshot.run(values)

        def work() -> tuple[dict[str, Any], bool]:
            streams.use_device()
            with streams.on(streams.ids):
                streams.take(features, streams.copy)
                stages.select.run(values)
                if finds:
                    stages.arrive.run(values)
            return values, finds

        self._hashed = worker.run(work)

    def wait(self) -> None:
        """Wait until the worker has finished with this call."""
        if self._hashed is not None:
            self._hashed.exception()

    def is_outdated(self) -> bool:
        """Whether the collection has another graph now, or nothing was begun."""
        self.wait()
        self.call.module.begin_forward()
        return self.call.module.graph_module is not self._graph

    def finish(self, streams: Streams) -> Any:
        """The rest of the call, in the model's forward. Returns its result.

        Raises:
            Exception: the error of the call, whether it happened ahead or now.
        """
        assert self._hashed is not None
        values, found = self._hashed.result()
        streams.take(values, streams.ids)
        if not found:
            self._stages.arrive.run(values)
        self._stages.compute.run(values)
        self._stages.collect.run(values)
        self._result = values[self._stages.collect.outputs[0]]
        return self._result
