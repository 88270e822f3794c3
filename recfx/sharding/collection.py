"""``ShardedHashEmbeddingBagCollection``: a TorchRec ``ShardedModule`` that owns a graph of explicit nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torchrec.distributed.embedding_sharding import KJTListAwaitable, KJTListSplitsAwaitable, KJTSplitsAllToAllMeta
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardedModule, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recfx.errors import ConversionError
from recfx.hashing.row_move import RowMove
from recfx.ir.shards import CollectionSharding
from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.nodes import HashIds, InputDistStart, Lookup, OutputDistStart, marks
from recfx.nodes.base import opaque
from recfx.nodes.dist_context import DistContext
from recfx.nodes.dist_groups import DistGroups
from recfx.nodes.fx_leaf import FxLeaf, tracer_of_call
from recfx.nodes.input_dist import Outgoing
from recfx.nodes.prefetched_rows import finder
from recfx.nodes.resources import Resources
from recfx.optim.in_backward import positions_with_hooks
from recfx.passes import PassRecord, passes, run_passes
from recfx.sharding.context import BatchContext
from recfx.sharding.end_of_data import CallsUnderWay, calls_under_way
from recfx.sharding.load_state import LocalState, drop_shard_names, load_local_state
from recfx.sharding.local_tables import LocalTables, make_local_tables
from recfx.sharding.optimizer import ShardedFusedOptimizer
from recfx.sharding.out_of_step import in_step, refuse_out_of_step
from recfx.sharding.pipeline_stages import CutGraph, Segment
from recfx.sharding.plan import read_plan
from recfx.sharding.state import save_sharded_state

# What input_dist_start gives; the second inside TorchRec's pipelines, which start all collections' exchanges at once.
_STARTED = (Awaitable, KJTSplitsAllToAllMeta)


class ShardedHashEmbeddingBagCollection(
    FxLeaf, ShardedModule[KJTList, dict[str, Any], KeyedTensor, BatchContext], FusedOptimizerModule
):
    """A collection on several ranks.

    Input and output are those of the unsharded collection, for this rank's batch; ``forward`` returns a
    ``LazyAwaitable[KeyedTensor]`` as TorchRec's do. Keys of the output stand in the unsharded order under every plan.
    Parameters are ``embedding_bags.<table>.weight``, this rank's shard; ``state_dict`` has ``ShardedTensor``s of all
    tables on all ranks (plain tensors for data-parallel ones).

    Made by ``recfx.convert(model, plan=...)``, by ``recfx.sharders()``, or by ``shard_collection``.

    Attributes:
        sharding: which shards are where.
        tables: the whole tables.
        fused: kind and settings of each table's fused optimizer.
        dtypes: of the tables' weights.
        taken: what nobody spelled out about the tables' optimizers.
        graph_module: this rank's graph.
    """

    def __init__(
        self,
        unsharded: HashEmbeddingBagCollection,
        sharding: CollectionSharding,
        groups: DistGroups,
        local: LocalTables,
    ) -> None:
        super().__init__()
        self._hash_ids: HashIds | None
        self.collection, self.backend, self.source = unsharded.collection, unsharded.backend, unsharded.source
        self.requested, self.calls = dict(unsharded.requested), unsharded.calls
        self._embedding_bag_configs, self._is_weighted = unsharded.embedding_bag_configs(), unsharded.is_weighted()
        self.tables, self.sharding, self.groups = unsharded.tables, sharding, groups
        self.not_fused = dict(unsharded.not_fused)
        self.embedding_bags, self.hash_indexes, self._store = local.bags, local.indexes, local.store
        self.fused, self.dtypes, self.taken = local.fused, local.dtypes, local.taken
        self._batches = 0  # of one of TorchRec's pipelines
        self._row_moves: dict[str, RowMove] = {}  # of the last load, for the optimizer's state
        self._compile(unsharded.unexpanded_graph(Resources(self._store, groups)))
        self._register_state_dict_hook(save_sharded_state)
        self.register_load_state_dict_pre_hook(load_local_state)
        self.register_load_state_dict_post_hook(drop_shard_names)
        self.train(unsharded.training)

    def _compile(self, graph_module: fx.GraphModule) -> None:
        pipeline = passes(self.backend, self.sharding)
        self.pass_records: list[PassRecord] = run_passes(graph_module, pipeline)
        self.graph_module = graph_module
        self._cut = CutGraph(graph_module)
        (self._result,) = self._segments[-1].outputs
        # What TorchRec's pipelines, and its introduction, look at.
        self._input_dists = [module for module in graph_module.modules() if isinstance(module, InputDistStart)]
        self._lookups = [module for module in graph_module.modules() if isinstance(module, Lookup)]
        self._output_dists = [module for module in graph_module.modules() if isinstance(module, OutputDistStart)]
        self._has_uninitialized_input_dist = False
        hashing = [module for module in graph_module.modules() if isinstance(module, HashIds)]
        self.__dict__["_hash_ids"] = hashing[0] if hashing else None

    @property
    def _segments(self) -> list[Segment]:
        """Of this object's graph: a copy around the same tables has modules, and so modes, of its own."""
        if self._cut.graph_module is not self.graph_module:
            self._cut = CutGraph(self.graph_module)
        return self._cut.segments

    # TorchRec's ShardedModule

    def forward(self, *arguments: Any, **keywords: Any) -> LazyAwaitable[KeyedTensor]:
        """As TorchRec's; under torch.compile the awaited ``KeyedTensor`` itself.

        It stays outside of the compiled graphs then: those of TorchRec's awaitables would keep one batch's sizes.
        """
        if torch.compiler.is_dynamo_compiling():
            waited: LazyAwaitable[KeyedTensor] = opaque(self._run, *arguments, **keywords)
            return waited
        tracer = tracer_of_call(self, arguments, keywords)
        if tracer is not None:  # the collection is the root of the trace, or the user's code calls `forward` itself
            traced: Any = self.leaf_call(tracer, arguments, keywords)
            return traced
        return super().forward(*arguments, **keywords)

    def path_of_root(self) -> str:
        """Where a graph of which this collection is the root finds it."""
        return "embedding_bag_collection"

    @property
    def embedding_bag_collection(self) -> ShardedHashEmbeddingBagCollection:
        """This collection itself: what the graph of ``torch.fx.symbolic_trace(collection)`` calls."""
        return self

    def _run(self, *arguments: Any, **keywords: Any) -> KeyedTensor:
        result: KeyedTensor = super().forward(*arguments, **keywords).wait()
        return result

    def create_context(self) -> BatchContext:
        """A new batch's context."""
        return BatchContext()

    def input_dist(self, ctx: BatchContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Start sending ids: the graph up to ``input_dist_start``.

        A batch that does not fit the collection takes part without ids, so that all ranks learn of it; its error is
        raised by ``compute``.

        Raises:
            OutOfStepError: an earlier step failed here when others had begun it; or another rank has no more data.
        """
        self.refuse_out_of_step()
        self._under_way.refuse(self)
        if self._row_moves and self.training:
            self._row_moves = {}
        values = ctx.values
        values["features"] = features
        select, send = self._segments[:2]
        (selected,) = send.inputs
        try:
            self._refuse_gradient_hooks()  # which may be on some ranks only
            select.run(values)
        except Exception as error:
            ctx.refused = error
        del values["features"]
        sending = self._send(ctx, values.get(selected) if ctx.refused is None else None)
        self._batches = ctx.number = self._batches + 1 if self.sent_by_pipeline else 1
        self._under_way.start(self, ctx)
        return sending

    def send_nothing(self, ctx: BatchContext) -> Awaitable[Awaitable[KJTList]]:
        """As ``input_dist``, without a batch: ``ctx.says`` tells the other ranks why."""
        self.refuse_out_of_step()
        return self._send(ctx, None)

    def _send(self, ctx: BatchContext, selected: KeyedJaggedTensor | None) -> Awaitable[Awaitable[KJTList]]:
        values, send = ctx.values, self._segments[1]
        (name,) = send.inputs
        outgoing = {name: Outgoing(selected, ctx.says | (marks.REFUSED if ctx.refused is not None else 0))}
        with in_step(self.groups.pooled, self.collection):
            send.run(outgoing)
        values.update({name: outgoing[name] for name in send.outputs})
        started = [name for name in send.outputs if isinstance(values[name], _STARTED)]
        ctx.sharding_contexts = [values[name] for name in send.outputs if isinstance(values[name], DistContext)]
        return _Sending(self, [values.pop(name) for name in started], ctx)

    def _refuse_gradient_hooks(self) -> None:
        """A fused shard has no gradient to show to a hook, and no dense optimizer to fall back on."""
        fused = [self._store.weight(shard) for shard in self._store.optimizers]
        for position in positions_with_hooks(fused):
            table = list(self._store.optimizers)[position]
            raise ConversionError(
                f"a gradient hook is registered on the weight of table {table!r}, whose fused optimizer steps inside "
                "the backward, without a gradient of the weight: the hook would never run.",
                reason="gradient_hook",
                module_path=self.collection,
                what_to_do="remove the hook; a hook on the collection's output sees the pooled gradient.",
            )

    def compute(self, ctx: BatchContext, dist_input: KJTList) -> dict[str, Any]:
        """Hash and look up what has arrived, and start sending pooled rows: up to ``output_dist_start``.

        Raises:
            InputError: the batch does not fit the collection, here or on another rank. All ranks raise it, for this
                batch alike; nothing was looked up.
            ConversionError: ``gradient_hook``, alike.
            OutOfStepError: an earlier step failed here when others had begun it; this batch's ids were sent before.
        """
        self.refuse_out_of_step()
        with in_step(self.groups.pooled, self.collection):
            self._under_way.run(self, ctx)
        wrong = ctx.refused or marks.verdict(ctx.marks, self.collection)
        if wrong is not None:
            raise wrong
        values, segment = ctx.values, self._segments[2]
        arriving = [name for name in segment.inputs if name not in values]
        with in_step(self.groups.pooled, self.collection):
            values.update(zip(arriving, dist_input, strict=True))
            segment.run(values)
        return values

    def output_dist(self, ctx: BatchContext, output: dict[str, Any]) -> LazyAwaitable[KeyedTensor]:
        """The rest of the graph, run when the result is needed."""
        return Result(self, self._segments[-1], output)

    @property
    def sent_by_pipeline(self) -> bool:
        """Whether one of TorchRec's pipelines sends this collection's ids."""
        return self._input_dists[0].is_pipelined

    @property
    def _under_way(self) -> CallsUnderWay:
        return calls_under_way(self.groups.ids)

    # What recfx.TrainPipeline does ahead

    def refuse_out_of_step(self) -> None:
        """Before anything is sent.

        Raises:
            OutOfStepError: an earlier step failed here when others had begun it.
        """
        refuse_out_of_step(self.groups.pooled, self.collection)

    def finder_of_rows(self) -> Callable[[KJTList], None] | None:
        """What looks up the rows of ids that have arrived, on any thread; None where that cannot be done ahead."""
        find = None if self._hash_ids is None else finder(self._hash_ids)
        if find is None:
            return None
        chosen = find
        return lambda arrived: chosen(arrived[0])

    def hashed_in_turn(self) -> list[str]:
        """Tables that count every id or evict: ranks that have one look rows up in the batch's own step."""
        return [table.name for table in self.tables if table.evicts or table.admits]

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The class that this one takes the place of."""
        return HashEmbeddingBagCollection

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """All parameters: none is for DistributedDataParallel, as replicas are kept equal here."""
        for name, _ in self.named_parameters(prefix):
            yield name

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """State and settings of the fused optimizers, under TorchRec's names and as ``ShardedTensor``s."""
        return ShardedFusedOptimizer(self.sharding, self._store, self.fused, self.groups.pooled, self._row_moves)

    def check_state(self, saved: Mapping[str, Any], prefix: str) -> None:
        """Whether this rank could load its part of a state; changes nothing.

        Args:
            saved: a state, also of a bigger model.
            prefix: of this collection's keys in it.

        Raises:
            CheckpointError: as ``LocalState``.
        """
        LocalState(self, saved, prefix)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedHashEmbeddingBagCollection:
        """A copy with tables of its own that communicates in the same process groups, which cannot be copied."""
        memo |= {id(group): group for group in vars(self.groups).values()}
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The whole tables' configs, in order."""
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        """Whether batches carry per-id weights."""
        return self._is_weighted


class _Sending(KJTListSplitsAwaitable[BatchContext]):
    """Sizes on their way, and then ids: other ranks wait for what goes wrong here."""

    def __init__(self, of: ShardedHashEmbeddingBagCollection, started: list[Awaitable[Any]], ctx: BatchContext) -> None:
        super().__init__(started, ctx)
        self._of = of

    def _wait_impl(self) -> KJTListAwaitable:
        with in_step(self._of.groups.pooled, self._of.collection):
            return _Arriving(self._of, super()._wait_impl())


class _Arriving(KJTListAwaitable):
    def __init__(self, of: ShardedHashEmbeddingBagCollection, ids: KJTListAwaitable) -> None:
        super().__init__(ids.awaitables, ids.ctx)
        self._of = of

    def _wait_impl(self) -> KJTList:
        with in_step(self._of.groups.pooled, self._of.collection):
            return super()._wait_impl()


class Result(LazyAwaitable[KeyedTensor]):
    """A segment that runs when its result is asked for. ``has_run``: whether it has."""

    def __init__(self, of: ShardedHashEmbeddingBagCollection, segment: Segment, values: dict[str, Any]) -> None:
        super().__init__()
        self._of, self._segment, self._values = of, segment, values
        self.has_run = False

    def _wait_impl(self) -> KeyedTensor:
        with in_step(self._of.groups.pooled, self._of.collection):
            self._segment.run(self._values)
        self.has_run = True
        keyed: KeyedTensor = self._values[self._of._result]
        return keyed


def sharded_collections(model: nn.Module) -> dict[str, ShardedHashEmbeddingBagCollection]:
    """The sharded collections of ``model``, by fully qualified name."""
    return {
        path: module for path, module in model.named_modules() if isinstance(module, ShardedHashEmbeddingBagCollection)
    }


def shard_collection(
    module: HashEmbeddingBagCollection,
    plan: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None = None,
    *,
    fused_params: Mapping[str, Any] | None = None,
    host_group: torch.distributed.ProcessGroup | None = None,
    dense_as_torchrec: bool = False,
    path: str = "",
) -> ShardedHashEmbeddingBagCollection:
    """Shard a converted collection; every rank calls it with the same plan.

    Weights, ids and the state of fused optimizers stay: each rank keeps its shards of what its own ``module`` holds,
    and replicas of data-parallel tables become those of rank 0. ``module`` itself is not changed.

    Args:
        module: the collection; tables on meta are allocated on ``device`` and initialised.
        plan: sharding of each table.
        env: with a process group.
        device: of the shards; None: where the tables are (``meta``: the CPU).
        fused_params: settings of fused optimizers for what tables do not bring themselves, as TorchRec's sharders take
            them. On compute kernel ``fused`` a table has a fused optimizer in any case: FBGEMM's SGD, at the least.
        dense_as_torchrec: on compute kernel ``dense`` a table has none, whatever hangs on it.
        host_group: the process group for ids, where it is not that of ``env``.
        path: fully qualified name of the collection in the model.

    Raises:
        ConversionError: as ``read_plan``; ``unsupported_fused_param``, ``no_process_group``.
    """
    path = path or module.collection
    sharding = read_plan(module.tables, plan, env.rank, env.world_size, path)
    groups = DistGroups.of(env, sharding.local_size, host_group)
    local = make_local_tables(
        module, sharding, groups.pooled, device, fused_params, dense_as_torchrec=dense_as_torchrec
    )
    return ShardedHashEmbeddingBagCollection(module, sharding, groups, local)
