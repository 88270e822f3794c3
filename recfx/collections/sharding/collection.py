"""``ShardedCollection``: a TorchRec ``ShardedModule`` that owns a graph of explicit nodes, which runs in stages.

The node kinds declare where the graph may be cut: before ids are sent, a batch can still be refused; where the graph
waits, something else can run; and before ids are hashed, which batches do in turn, their rows can be found. The stages
share the graph's modules, and run one after the other on values that are named after their nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.autograd import profiler
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardedModule
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from recfx.collections.collection import UnshardedCollection
from recfx.collections.compile_graph import compile_graph
from recfx.collections.converted_collection import ConvertedCollection, collections_of
from recfx.collections.copy_modules import OWN_HOOK, carry_hooks
from recfx.collections.hash_collections import CONVERTED_CLASSES, PooledCollection, SequenceCollection
from recfx.collections.kinds import POOLED, SEQUENCE, CollectionKind, kind_of
from recfx.collections.optimizer import FusedKeyedOptimizer
from recfx.collections.sharding.settings import OptimizerSettings
from recfx.collections.table_state import drop_shard_names, save_sharded_state
from recfx.errors import CheckpointError, ConversionError, Diagnostic, OutOfStepError
from recfx.ir.meta import node_meta
from recfx.ir.node_kinds import CUTS, NODE_KINDS
from recfx.ir.shards import CollectionSharding
from recfx.passes.base import PASSES_KEY
from recfx.runtime import marks
from recfx.runtime.bags import with_own_lengths
from recfx.runtime.base import NodeModule
from recfx.runtime.dist_groups import DistGroups
from recfx.runtime.find_rows import FindRows
from recfx.runtime.hash_ids import HashIds, HashLookup
from recfx.runtime.in_flight import BATCHES_IN_FLIGHT
from recfx.runtime.input_dist import DistContext, Exchange, InputDistStart, Outgoing
from recfx.runtime.lookup import Lookup
from recfx.runtime.lowered import Runtime
from recfx.runtime.marks import InStep
from recfx.runtime.output_dist import OutputDistStart
from recfx.runtime.table_store import TableStore
from recfx.runtime.transfers import crosses, record_stream
from recfx.versions.differences import BaseForward

# A node of this kind, and all nodes that depend on it, come after the cut with this number.
_CUT_BEFORE = {kind: number for number, kind in enumerate(CUTS, start=1)}
_CUT_BEFORE["find_rows"] = _CUT_BEFORE["hash_ids"]  # for which it stands


class Stage:
    """Nodes of a graph that run one after the other on values by name. A node for which there is a value already, which
    was computed ahead, takes that in place of its arguments.
    """

    def __init__(self) -> None:
        # The name of each node, what it calls, its arguments, and the values that nothing needs after it.
        self.steps: list[tuple[str, Callable[..., Any], tuple[Any, ...], list[str]]] = []

    def run(self, values: dict[str, Any]) -> None:
        """Add the values of these nodes to those of earlier stages, and remove what no later node needs."""
        is_quiet = not profiler._is_profiler_enabled  # and no tracer is here, so nodes need not look for one
        for name, call, args, last in self.steps:
            run = call._call_impl if is_quiet and isinstance(call, NodeModule) else call
            given = [values[arg.name] if isinstance(arg, fx.Node) else arg for arg in args]
            values[name] = run(*([values[name]] if name in values else given))
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
        self.hashing = list[tuple[str, str, Any]]()  # the names of nodes and of their ids, and what finds these
        for node in numbers:
            module = modules.get(node.target) if isinstance(node.target, str) else None
            if isinstance(module, (HashIds, HashLookup, FindRows)):
                (ids,) = node.all_input_nodes
                if numbers[ids] < numbers[node]:
                    finding = module.hash_ids if isinstance(module, HashLookup) else module
                    self.hashing.append((node.name, ids.name, finding))

    def finder(self) -> Callable[[dict[str, Any]], None] | None:
        """What finds rows ahead, when ids have arrived in the values that it is given; None if nothing may be found
        ahead: see ``HashIds.finder``.
        """
        finders = [(name, ids, finder) for name, ids, node in self.hashing if (finder := node.finder()) is not None]

        def find(values: dict[str, Any]) -> None:
            values.update({name: finder(values[ids]) for name, ids, finder in finders})

        return find if finders else None


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


class ShardedCollection(
    ConvertedCollection, ShardedModule[KJTList, dict[str, Any], Any, BatchContext], FusedOptimizerModule
):
    """A collection on several ranks; base of the class of each kind.

    Input and output are those of the unsharded collection, for this rank's batch; ``forward`` returns a
    ``LazyAwaitable`` as TorchRec's do. Keys of the output are in the unsharded order under every plan.
    Parameters have the names of the unsharded ones, and are this rank's shard; ``state_dict`` has ``ShardedTensor``s of
    all tables on all ranks (plain tensors for data-parallel ones).
    """

    is_sharded = True
    taken: dict[str, tuple[Diagnostic, ...]]  # choices about optimizers that the user did not spell out, by table
    in_step: InStep  # the context of what other ranks wait for
    _checked: Any = None  # what ``TableStore.look`` returned when the tables were last found to be as they must be
    _computed: Any = None  # and when all lookups last ran

    def __init__(
        self, unsharded: UnshardedCollection, sharding: CollectionSharding, groups: DistGroups, store: TableStore,
        settings: OptimizerSettings,
    ) -> None:  # fmt: skip
        super().__init__()
        self.collection, self.backend, self.source = unsharded.collection, unsharded.backend, unsharded.source
        self.requested, self.calls, self.passes = dict(unsharded.requested), unsharded.calls, unsharded.passes
        self.not_fused, self._is_weighted = dict(unsharded.not_fused), unsharded.is_weighted()
        kind = kind_of(self)
        setattr(self, kind.configs_attribute, kind.configs_of(unsharded))
        self.__dict__.update(kind.settings_of(unsharded))
        self._store, self._made_on = store, store.device
        setattr(self, kind.tables, store.bags)
        self.hash_indexes = store.indexes
        self.tables = tuple(sharded.table for sharded in sharding.tables)
        self.sharding, self.groups, self.process_group = sharding, groups, groups.pooled
        self.fused, self.taken = settings.fused, settings.taken
        self.dtypes = {table.name: unsharded.weight(table.name).dtype for table in unsharded.tables}
        self._row_moves = {}
        self._runtime = Runtime(store, groups)
        self.graph_module = compile_graph(self.unexpanded_graph(), self._runtime, self.backend, self.passes)
        self.pass_records = list(self.graph_module.meta[PASSES_KEY])
        self.in_step = InStep(groups.pooled, self.collection)
        self._cut = Stages(self.graph_module)
        # Attributes that TorchRec's pipelines, and its introduction, use.
        modules = list(self.graph_module.modules())
        self._selecting = self._runtime.of("select_features")
        self._input_dists = [module for module in modules if isinstance(module, InputDistStart)]
        self._lookups = [module for module in modules if isinstance(module, Lookup)]
        self._output_dists = [module for module in modules if isinstance(module, OutputDistStart)]
        self._has_uninitialized_input_dist = False
        self._take_depth()
        self._state_dict_hooks[OWN_HOOK] = save_sharded_state
        self._load_state_dict_post_hooks[OWN_HOOK] = drop_shard_names
        carry_hooks(unsharded, self)
        self.train(unsharded.training)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The class that this one replaces."""
        return CONVERTED_CLASSES[kind_of(self)]

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """All parameters: none is for DistributedDataParallel, because replicas are kept equal here."""
        for name, _ in self.named_parameters(prefix):
            yield name

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """State and settings of the fused optimizers, under TorchRec's names and as ``ShardedTensor``s."""
        return FusedKeyedOptimizer(self)

    def prepare_to_save(self) -> None:
        """Check this rank's indexes, and make the optimizer state that is missing."""
        for shard in self.sharding.local():
            if shard.table.has_index:
                self._store.index(shard.name).refresh()
            if shard.name in self._store.optimizers:
                self._store.optimizers[shard.name].prepare(self._store.weight(shard.name))

    # The steps of a batch, which TorchRec's and recfx's pipelines call one by one

    def _take_depth(self) -> None:
        depth = self.batches_in_flight
        for start in self._input_dists:
            start.agree_on("" if depth == BATCHES_IN_FLIGHT else f"batches_in_flight={depth}")

    @property
    def _stages(self) -> Stages:
        """The stages of this graph: a copy around the same tables has its own modules, with their own modes."""
        if self._cut.graph_module is not self.graph_module:
            self._cut = Stages(self.graph_module)
        return self._cut

    def forward(self, *arguments: Any, **keywords: Any) -> LazyAwaitable[Any]:
        """An awaitable, as from TorchRec's sharded collections; under torch.compile, whose graphs with awaitables would
        keep the sizes of one batch, the awaited output itself.
        """
        return self._enter(self._run, self._run_awaited, *arguments, **keywords)

    def _run(self, *arguments: Any, **keywords: Any) -> LazyAwaitable[Any]:
        ctx = self.create_context()
        ctx.at_once = True
        arrived = self.input_dist(ctx, *arguments, **keywords).wait().wait()
        return self.output_dist(ctx, self.compute(ctx, arrived))

    def _run_awaited(self, *arguments: Any, **keywords: Any) -> Any:
        return self._run(*arguments, **keywords).wait()

    @property
    def in_torchrecs_pipeline(self) -> bool:
        return isinstance(self.forward, BaseForward)

    def create_context(self) -> BatchContext:
        in_pipeline = self.in_torchrecs_pipeline
        return BatchContext(says=marks.AHEAD if in_pipeline else 0, in_torchrecs_pipeline=in_pipeline)

    def input_dist(self, ctx: BatchContext, features: KeyedJaggedTensor | None) -> Awaitable[Awaitable[KJTList]]:
        """Start sending ids: the graph up to ``input_dist_start``. A batch that does not fit the collection takes part
        without ids, so that all ranks learn of it; its error is raised by ``compute``.
        """
        self.in_step.refuse_if_failed()
        if self._row_moves:
            self._forget_row_moves()
        values, stages = ctx.values, self._stages
        ctx.stages = stages
        if ctx.refused is None:
            values["features"] = features
            try:
                tables = self._check_tables()
                ctx.looked = tables if ctx.at_once else None
                for selecting in self._selecting:
                    selecting.is_ahead = not ctx.at_once
                stages.select.run(values)
            except Exception as error:
                ctx.refused = error
                values.clear()
        name = stages.selected
        says = ctx.says | (marks.REFUSED if ctx.refused is not None else 0)
        sent: dict[str, Any] = {name: Outgoing(values.get(name), says)}
        with self.in_step:
            stages.send.run(sent)
        if sent.pop(name, None) is None:
            values.pop(name, None)  # nothing needs it any more
        elif name in values:  # rows that come back are divided, or cut, by lengths that the caller may have refilled
            values[name] = with_own_lengths(values[name])
        ctx.sharding_contexts = [value for value in sent.values() if isinstance(value, DistContext)]
        ctx.started = [name for name, value in sent.items() if isinstance(value, Awaitable)]
        started = [Guarded(sent.pop(name), ctx, self.in_step) for name in ctx.started]
        values.update(sent)
        return KJTListSplitsAwaitable(started, ctx)

    @contextmanager
    def sent_by(self, exchange: Exchange | None) -> Iterator[None]:
        """Within this context, ids are added to ``exchange`` instead of being sent, if there is one."""
        try:
            for start in self._input_dists:
                start.together = exchange
            yield
        finally:
            for start in self._input_dists:
                start.together = None

    def refuse(self, ctx: BatchContext, error: Exception) -> Awaitable[Awaitable[KJTList]]:
        """Take part without a batch: ``compute`` raises ``error`` on this rank, and the other ranks refuse theirs."""
        ctx.refused = error
        return self.input_dist(ctx, None)

    def _check_tables(self) -> Any:
        """What ``TableStore.look`` returns, before ids are sent. Refuses what a rank has done to its tables since the
        last batch: not in ``to()`` itself, because a model that stops halfway through it would be on two devices.
        """
        tables = self._store.look()
        if tables == self._checked:
            return tables
        self._store.refuse_gradient_hooks(list(self._store.optimizers), self.collection)
        device, host = self._store.device, torch.device("cpu")
        if crosses(device, host) == crosses(self._made_on, host):
            self._checked = tables
            return tables
        raise ConversionError(
            f"the collection was sharded with its tables on {self._made_on}, but they have been moved to {device}; its "
            f"process groups, and its copies of ids between the host and a device, are for {self._made_on}.",
            reason="sharded_tables_moved",
            module_path=self.collection,
            what_to_do=f"move the model back to {self._made_on}; or unconvert it, move it to {device}, and shard it "
            "there, in process groups of that device.",
        )

    def compute(self, ctx: BatchContext, dist_input: KJTList) -> dict[str, Any]:
        """Hash and look up what has arrived, and start sending pooled rows: up to ``output_dist_start``. If the batch
        does not fit the collection, here or on another rank, all ranks raise that, and nothing is looked up.
        """
        self.in_step.refuse_if_failed()
        wrong: Exception | None = marks.verdict(ctx.marks, self.collection, self.groups.ids)
        if ctx.refused is not None and not isinstance(wrong, OutOfStepError):
            wrong = ctx.refused
        if wrong is not None:
            raise wrong
        with self.in_step:
            if not ctx.arrives_ahead:
                self._arrive(ctx, dist_input)
            tables = ctx.looked or self._store.look()
            self._store.graph_fits = tables == self._computed
            try:
                ctx.stages.compute.run(ctx.values)
            finally:
                self._store.graph_fits = False
            if torch.is_grad_enabled():  # otherwise, lookups do not ask whose tensors they read
                self._computed = tables
        return ctx.values

    def _arrive(self, ctx: BatchContext, dist_input: KJTList) -> None:
        """Run the stage that begins with the ids that have arrived."""
        ctx.values.update(zip(ctx.started, dist_input, strict=True))
        ctx.stages.arrive.run(ctx.values)

    def output_dist(self, ctx: BatchContext, output: dict[str, Any]) -> LazyAwaitable[Any]:
        """The rest of the graph, run when the result is needed."""
        return Result(ctx.stages, output, self.in_step)

    # Steps that recfx.TrainPipeline runs ahead

    def prefetcher(self, ctx: BatchContext) -> Callable[[KJTList], None] | None:
        """A function that finds the rows of ids that have arrived; None if rows must be found in the batch's own step.
        Call this on the thread that owns the indexes; the function may run on any thread, once, before ``compute``.
        """
        find = ctx.stages.finder()
        if find is None:
            return None
        ctx.arrives_ahead = True

        def arrive(arrived: KJTList) -> None:
            self._arrive(ctx, arrived)
            find(ctx.values)

        return arrive

    # Copies

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled: process groups cannot be, and a rank has no more than its shards."""
        raise CheckpointError(
            "a sharded collection cannot be pickled (as torch.save(model) and new processes do): its process groups "
            "belong to this process, and its tables are this rank's shards.",
            reason="sharded_not_pickled",
            module_path=self.collection,
            what_to_do="save a run with recfx.save_checkpoint(model, folder), or model.state_dict(), on all ranks. For "
            "the whole tables in one process, call recfx.unconvert(model) or recfx.export(model, file) on all ranks. "
            "copy.deepcopy copies the model within this process.",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedCollection:
        """A copy with its own tables that communicates in the same process groups, which cannot be copied."""
        memo |= {id(group): group for group in vars(self.groups).values()}
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate


class ShardedHashEmbeddingBagCollection(PooledCollection, ShardedCollection):
    """Pooled embeddings; ``forward`` returns a ``LazyAwaitable[KeyedTensor]``."""


class ShardedHashEmbeddingCollection(SequenceCollection, ShardedCollection):
    """A row for each id; ``forward`` returns a ``LazyAwaitable[Dict[str, JaggedTensor]]``."""


SHARDED: dict[CollectionKind, type[ShardedCollection]] = {
    POOLED: ShardedHashEmbeddingBagCollection,
    SEQUENCE: ShardedHashEmbeddingCollection,
}
"""The class of sharded collections of each kind, one line per kind."""


def sharded_collections(model: nn.Module) -> dict[str, ShardedCollection]:
    """The sharded collections of ``model``, by fully qualified name."""
    return collections_of(model, ShardedCollection)
