"""A collection's graph in stages, between which a pipeline may do other things; and the batch that goes through them.

The node kinds declare where the graph may be cut: before ids are sent, a batch can still be refused; where the graph
waits, something else can run; and rows are found, which only reads, one stage before they are inserted.

The stages share the graph's modules and run one after the other. Values that go from one stage to a later one are named
after the nodes that make them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd import profiler
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.streamable import Multistreamable

from recfx.collections.compile_graph import compile_again
from recfx.errors import OutOfStepError
from recfx.ir.meta import node_meta
from recfx.ir.node_kinds import CUTS, NODE_KINDS
from recfx.passes.base import Rewrite
from recfx.passes.split_hash_ids import split_hash_ids
from recfx.runtime import marks
from recfx.runtime.base import NodeModule
from recfx.runtime.hash_ids import SnapshotIndexes
from recfx.runtime.input_dist import DistContext
from recfx.runtime.lowered import Runtime
from recfx.runtime.marks import InStep
from recfx.runtime.transfers import record_stream

SPLIT_HASH_IDS = Rewrite("split_hash_ids", split_hash_ids)

# A node of this kind, and all nodes that depend on it, come after the cut with this number.
_CUT_BEFORE = {kind: number for number, kind in enumerate(CUTS, start=1)}


class Stage:
    """A piece of a graph, run node by node: it takes values by the names of nodes, and makes those of its outputs.

    Args:
        modules: what the nodes call, by target.
        nodes: its nodes, in order.
        inputs: the names of the nodes, of earlier stages, whose values it takes.
        outputs: those whose values later stages need; without any, nothing runs.
    """

    def __init__(
        self, modules: Mapping[str, Any], nodes: Sequence[fx.Node], inputs: list[str], outputs: list[str]
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._steps = []
        dropped = set(outputs)
        for node in reversed(nodes):
            sources = [source.name for source in node.all_input_nodes]
            last = [name for name in dict.fromkeys((*sources, node.name)) if name not in dropped]
            dropped.update(last)
            call = modules[node.target] if isinstance(node.target, str) else node.target
            self._steps.append((node.name, call, node.args, last))
        self._steps.reverse()

    def run(self, values: dict[str, Any]) -> None:
        """Take the inputs out of ``values`` by name, and put the outputs there."""
        if not self.outputs:
            return
        made = {name: values[name] for name in self.inputs}
        is_quiet = not profiler._is_profiler_enabled  # and no tracer is here, so nodes need not look for one
        for name, call, args, last in self._steps:
            arguments = [made[arg.name] if isinstance(arg, fx.Node) else arg for arg in args]
            run = call._call_impl if is_quiet and isinstance(call, NodeModule) else call
            made[name] = run(*arguments)
            del arguments
            for used in last:
                del made[used]
        values.update({name: made[name] for name in self.outputs})


class Stages(NamedTuple):
    """A graph, cut before each kind of ``CUTS``.

    Args:
        select: a rank's own work.
        send: ``input_dist_start``.
        snapshot: records what is needed before something runs on another thread.
        arrive: waits for ids, then ``find_ids`` or ``hash_ids``.
        compute: from ``insert_ids``, or from the lookups, to the last ``output_dist_start``.
        collect: the rest.
    """

    select: Stage
    send: Stage
    snapshot: Stage
    arrive: Stage
    compute: Stage
    collect: Stage


class StagedGraph:
    """A graph and its stages. Not a module or container, so copies of modules share it until they make their own."""

    def __init__(self, graph_module: fx.GraphModule, runtime: Runtime) -> None:
        self.graph_module, self.in_turn = graph_module, cut(graph_module)
        self._runtime = runtime

    @cached_property
    def split(self) -> tuple[Stages, list[SnapshotIndexes]]:
        """The stages with ``find_ids`` and ``insert_ids`` in place of nodes that find and insert at once, and what
        records the indexes between them. The graph does not change; the two share all other modules.
        """
        graph_module, _ = compile_again(self.graph_module, self._runtime, (SPLIT_HASH_IDS,))
        return cut(graph_module), [module for module in graph_module.children() if isinstance(module, SnapshotIndexes)]

    @property
    def prefetching(self) -> Stages | None:
        """The stages that find rows ahead; None if they may not be found now: no index, or not all indexes allow it."""
        stages, snapshots = self.split
        return stages if snapshots and all(snapshot.is_of_use for snapshot in snapshots) else None


def cut(graph_module: fx.GraphModule) -> Stages:
    """The stages of a graph. A node comes after all cuts of earlier stages of a step, whatever it needs: a rank without
    a shard of some tables calls their ``output_dist_start`` in its turn all the same.
    """
    number_of: dict[fx.Node, int] = {}
    for node in graph_module.graph.nodes:
        if node.op != "output":
            meta = node_meta(node)
            earliest = 0 if meta is None else _earliest(meta.kind)
            number_of[node] = max([earliest, *(number_of[source] for source in node.all_input_nodes)])
    (result,) = next(node for node in graph_module.graph.nodes if node.op == "output").all_input_nodes
    modules = dict(graph_module.named_children())

    def stage(number: int) -> Stage:
        nodes = [node for node, own in number_of.items() if own == number and node.op != "placeholder"]
        sources = [source for node in nodes for source in node.all_input_nodes]
        taken = [source.name for source in sources if source.op == "placeholder" or number_of[source] != number]
        given = [
            node.name
            for node in nodes
            if node is result or any(number_of.get(user, number) > number for user in node.users)
        ]
        return Stage(modules, nodes, list(dict.fromkeys(taken)), given)

    return Stages(*map(stage, range(len(CUTS) + 1)))


def _earliest(kind: str) -> int:
    if kind in _CUT_BEFORE:
        return _CUT_BEFORE[kind]
    own = NODE_KINDS[kind].stage.value
    return max((number for cut, number in _CUT_BEFORE.items() if NODE_KINDS[cut].stage.value < own), default=0)


@dataclass
class BatchContext(Multistreamable):
    """What a batch keeps while it is in flight: values that cross the cuts of a collection's graph, by node name.

    Attributes:
        sharding_contexts: where TorchRec's awaitables write batch sizes; the objects on the graph's edges.
        says: what this rank tells the others along with its ids, as bits of ``marks``.
        refused: why this rank has no ids for this call.
        stages: the form of the graph that this batch runs through; None until its ids are sent.
        arrives_ahead: whether the stage that begins with arrived ids runs before ``compute``.
        in_torchrecs_pipeline: whether one of TorchRec's pipelines sends it ahead.
        at_once: whether all steps of the batch run without a user's code between them.
        looked: then, what ``TableStore.look`` returned before ids were sent.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sharding_contexts: list[DistContext] = field(default_factory=list)
    says: int = 0
    refused: Exception | None = None
    stages: Stages | None = None
    arrives_ahead: bool = False
    in_torchrecs_pipeline: bool = False
    at_once: bool = False
    looked: Any = None

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
    """What was started for a call: sizes in flight, and then ids; other ranks wait if anything goes wrong here.

    If ranks are at different calls while an earlier batch is in flight, this rank sends nothing more if they run that
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
