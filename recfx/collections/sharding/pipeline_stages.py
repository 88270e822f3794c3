"""A collection's graph in stages, between which a pipeline may do other things; and the batch that goes through them.

The node kinds declare where the graph may be cut: before ids are sent, a batch can still be refused; where the graph
waits, something else can run; and before ids are hashed, which batches do in turn, their rows can be found.

The stages share the graph's modules and run one after the other on values that are named after their nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.autograd import profiler
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.streamable import Multistreamable

from recfx.errors import OutOfStepError
from recfx.ir.meta import node_meta
from recfx.ir.node_kinds import CUTS, NODE_KINDS
from recfx.runtime import marks
from recfx.runtime.base import NodeModule
from recfx.runtime.hash_ids import HashIds, HashLookup
from recfx.runtime.input_dist import DistContext
from recfx.runtime.marks import InStep
from recfx.runtime.transfers import record_stream

# A node of this kind, and all nodes that depend on it, come after the cut with this number.
_CUT_BEFORE = {kind: number for number, kind in enumerate(CUTS, start=1)}
_HASHED = _CUT_BEFORE["hash_ids"]


class Stage:
    """Nodes of a graph that run one after the other on values by name."""

    def __init__(self) -> None:
        # The name of each node, what it calls, its arguments, and the values that nothing needs after it.
        self.steps: list[tuple[str, Callable[..., Any], tuple[Any, ...], list[str]]] = []

    def run(self, values: dict[str, Any]) -> None:
        """Add the values of these nodes to those of earlier stages, and remove what no later node needs."""
        is_quiet = not profiler._is_profiler_enabled  # and no tracer is here, so nodes need not look for one
        for name, call, args, last in self.steps:
            run = call._call_impl if is_quiet and isinstance(call, NodeModule) else call
            values[name] = run(*[values[arg.name] if isinstance(arg, fx.Node) else arg for arg in args])
            for used in last:
                del values[used]


class Stages:
    """A graph, cut before each kind of ``CUTS``. Not a module or container, so copies of modules share it until they
    make their own.

    ``select`` is a rank's own work, ``send`` is ``input_dist_start``, ``arrive`` waits for ids, ``compute`` goes from
    the nodes that hash, or from the lookups, to the last ``output_dist_start``, and ``collect`` is the rest. A node
    comes after all cuts of earlier stages of a step, whatever it needs: a rank without a shard of some tables calls
    their ``output_dist_start`` in its turn all the same. ``selected`` names the ids that ``send`` takes, ``result`` the
    output.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        modules, numbers = dict(graph_module.named_children()), dict[fx.Node, int]()
        (result,) = next(node for node in graph_module.graph.nodes if node.op == "output").all_input_nodes
        for node in graph_module.graph.nodes:
            if node.op != "output":
                meta = node_meta(node)
                earliest = 0 if meta is None else _earliest(meta.kind)
                numbers[node] = max([earliest, *(numbers[source] for source in node.all_input_nodes)])
        stages = [Stage() for _ in range(len(CUTS) + 1)]
        self.select, self.send, self.arrive, self.compute, self.collect = stages
        later, self.result = {result}, result.name
        for node in sorted(numbers, key=numbers.__getitem__)[::-1]:
            if node.op != "placeholder":
                last = [value for value in dict.fromkeys((*node.all_input_nodes, node)) if value not in later]
                later.update(last)
                call = modules[node.target] if isinstance(node.target, str) else node.target
                stages[numbers[node]].steps.insert(0, (node.name, call, node.args, [value.name for value in last]))
        sent = (source for node in numbers if numbers[node] == 1 for source in node.all_input_nodes)
        self.selected = next((source.name for source in sent if numbers[source] == 0), "")
        self._hashing = {}  # by the ids that nothing else takes then
        for node in numbers:
            module = modules.get(node.target) if isinstance(node.target, str) else None
            if isinstance(module, (HashIds, HashLookup)):
                (ids,) = node.all_input_nodes
                readers = [user for user in ids.users if numbers.get(user, _HASHED) >= _HASHED]
                if numbers[ids] < _HASHED and readers == [node]:
                    self._hashing[ids.name] = module.hash_ids if isinstance(module, HashLookup) else module

    def finders(self) -> dict[str, Callable[[Any], Any]]:
        """By the names of ids that arrive, what finds their rows ahead; see ``HashIds.finder``."""
        finders = {name: module.finder() for name, module in self._hashing.items()}
        return {name: finder for name, finder in finders.items() if finder is not None}


def _earliest(kind: str) -> int:
    if kind in _CUT_BEFORE:
        return _CUT_BEFORE[kind]
    own = NODE_KINDS[kind].stage.value
    return max((number for cut, number in _CUT_BEFORE.items() if NODE_KINDS[cut].stage.value < own), default=0)


@dataclass
class BatchContext(Multistreamable):
    """What a batch keeps while it is in flight: values that cross the cuts of a collection's graph, by node name."""

    values: dict[str, Any] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)  # the values that ids which arrive take the places of
    sharding_contexts: list[DistContext] = field(default_factory=list)  # where TorchRec's awaitables write batch sizes
    says: int = 0  # what this rank tells the others along with its ids, as bits of ``marks``
    refused: Exception | None = None  # why this rank has no ids for this call
    stages: Any = None  # ``Stages`` of the graph that this batch runs through; None until its ids are sent
    arrives_ahead: bool = False  # whether the stage that begins with arrived ids runs before ``compute``
    in_torchrecs_pipeline: bool = False  # whether one of TorchRec's pipelines sends it ahead
    at_once: bool = False  # whether all steps of the batch run without a user's code between them
    looked: Any = None  # then, what ``TableStore.look`` returned before ids were sent

    @property
    def marks(self) -> list[int]:
        """The marks of all ranks; none before the sizes of the ids have arrived."""
        return self.sharding_contexts[0].output_splits if self.sharding_contexts else []

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the values that cross a cut alive for ``stream``."""
        for value in self.values.values():
            if isinstance(value, (torch.Tensor, Multistreamable)):
                record_stream(value, stream)


class Guarded(Awaitable[Any]):
    """What was started for a call: sizes in flight, and then ids; other ranks wait if anything goes wrong here. If
    ranks are at different calls while an earlier batch is in flight, this rank sends nothing more if they run that
    batch in different modes, or if sizes of other collections are on their way.
    """

    def __init__(self, started: Awaitable[Any], ctx: BatchContext, in_step: InStep) -> None:
        super().__init__()
        self._started, self._ctx, self._in_step = started, ctx, in_step

    def _wait_impl(self) -> Any:
        with self._in_step:
            try:
                arrived = self._started.wait()
            except OutOfStepError as error:
                if self._ctx.in_torchrecs_pipeline or (error.by_all_ranks and self._ctx.says & marks.AHEAD):
                    self._in_step.give_up(error)
                raise
        return Guarded(arrived, self._ctx, self._in_step) if isinstance(arrived, Awaitable) else arrived


class Result(LazyAwaitable[Any]):
    """The last stage of a graph, which has one output; it runs on the first wait, and later ones give the same."""

    def __init__(self, stages: Stages, values: dict[str, Any], in_step: InStep) -> None:
        super().__init__()
        self._stages, self._values, self._in_step = stages, values, in_step
        self.has_run = False

    def _wait_impl(self) -> Any:
        if not self.has_run:
            with self._in_step:
                self._stages.collect.run(self._values)
            self.has_run = True
        return self._values[self._stages.result]
