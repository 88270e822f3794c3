"""``ShardedCollection``: a TorchRec ``ShardedModule`` that owns a graph of explicit nodes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import get_ec_index_dedup
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer

from recfx.collections.collection import UnshardedCollection
from recfx.collections.compile_graph import compile_graph, context_of, refuse_raw_ids
from recfx.collections.converted_classes import converted_class
from recfx.collections.converted_collection import collections_of
from recfx.collections.kinds import POOLED, SEQUENCE, CollectionKind, kind_of
from recfx.collections.pooled import PooledCollection
from recfx.collections.sequence import SequenceCollection
from recfx.collections.sharding.batch_steps import BatchSteps
from recfx.collections.sharding.load_state import LocalState, drop_shard_names, load_local_state
from recfx.collections.sharding.optimizer import ShardedFusedOptimizer
from recfx.collections.sharding.optimizer_settings import OptimizerSettings, check_optimizers, optimizer_settings
from recfx.collections.sharding.plan import agreed_sharding, read_plan
from recfx.collections.sharding.same_settings import settings_of
from recfx.collections.sharding.state import save_sharded_state
from recfx.errors import CheckpointError, ConversionError
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.shards import CollectionSharding
from recfx.ir.snapshot import PASSES_KEY
from recfx.ir.tables import TableSpec
from recfx.ir.ways_back import Wires
from recfx.lowering.targets import TargetsHere
from recfx.runtime.bags import FBGEMM_PERMUTES_ON
from recfx.runtime.dist_groups import DistGroups, sent_on
from recfx.runtime.lower_graph import Runtime


def hook_refused(what: str, path: str) -> ConversionError:
    """The error for a tool that waits for what a sharded collection does not call.

    Args:
        what: the tool, as the beginning of a sentence.
    """
    return ConversionError(
        f"{what} would be told of no lookup: a sharded collection of recfx runs a graph of its own kernels, without "
        "TorchRec's lookup modules and their hooks.",
        reason="torchrec_hook_not_called",
        module_path=path,
        what_to_do="leave the collections that it is for unconverted, so that TorchRec shards them; or compare "
        "state_dict() before and after, where fused tables move only the rows that batches use.",
    )


def _refused_tracker(register: str) -> property:
    """The attribute that holds what ``register`` would register: it stays None."""

    def refuse(self: ShardedCollection, record_fn: Any) -> None:
        if record_fn is not None:
            getattr(self, register)(record_fn)

    return property(lambda self: None, refuse, doc="None. Setting anything else raises an error, as registering does.")


class ShardedCollection(BatchSteps, FusedOptimizerModule):
    """A collection on several ranks; base of the class of each kind.

    Input and output are those of the unsharded collection, for this rank's batch; ``forward`` returns a
    ``LazyAwaitable`` as TorchRec's do. Keys of the output are in the unsharded order under every plan.
    Parameters have the names of the unsharded ones, and are this rank's shard; ``state_dict`` has ``ShardedTensor``s of
    all tables on all ranks (plain tensors for data-parallel ones).

    Made by ``recfx.convert(model, plan=...)``, by ``recfx.sharders()``, or by ``shard_collection``.

    Attributes are those of ``ConvertedCollection`` and ``ShardedTables``; ``graph_module`` is this rank's graph.
    """

    def __init__(
        self,
        unsharded: UnshardedCollection,
        sharding: CollectionSharding,
        groups: DistGroups,
        device: torch.device | None,
        settings: OptimizerSettings,
    ) -> None:
        super().__init__()
        self.take_tables(unsharded, sharding, groups, device, settings)
        self._runtime = Runtime(self._store, groups)
        context = context_of(
            self.collection,
            self.tables,
            self._is_weighted,
            self._runtime,
            self.source,
            sharding,
            need_indices=self._need_indices,
        )
        graph = OperatorGraph.of(context, TargetsHere(self.backend))
        self.graph_module = compile_graph(graph, self._runtime, self.backend, self.passes)
        refuse_raw_ids(self.graph_module)
        self.pass_records = list(self.graph_module.meta[PASSES_KEY])
        self._cut_into_steps()
        self._register_state_dict_hook(save_sharded_state)
        self.register_load_state_dict_pre_hook(load_local_state)
        self.register_load_state_dict_post_hook(drop_shard_names)
        self.train(unsharded.training)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The class that this one replaces."""
        return converted_class(kind_of(self))

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """All parameters: none is for DistributedDataParallel, because replicas are kept equal here."""
        for name, _ in self.named_parameters(prefix):
            yield name

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """State and settings of the fused optimizers, under TorchRec's names and as ``ShardedTensor``s."""
        return ShardedFusedOptimizer(self)

    def check_state(self, saved: Mapping[str, Any], prefix: str) -> None:
        LocalState(self, saved, prefix)

    def register_post_lookup_tracker_fn(self, record_fn: Any) -> None:
        """Raises a ``ConversionError``, ``torchrec_hook_not_called``."""
        raise hook_refused("register_post_lookup_tracker_fn: a tracker", self.collection)

    def register_post_odist_tracker_fn(self, record_fn: Any) -> None:
        """Raises a ``ConversionError``, ``torchrec_hook_not_called``."""
        raise hook_refused("register_post_odist_tracker_fn: a tracker", self.collection)

    post_lookup_tracker_fn = _refused_tracker("register_post_lookup_tracker_fn")
    post_odist_tracker_fn = _refused_tracker("register_post_odist_tracker_fn")

    def own_names(self) -> frozenset[str]:
        """All attributes: what users put on a collection stays with the unsharded one."""
        return frozenset(self.__dict__)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled: process groups cannot be, and a rank has no more than its shards.

        Raises:
            CheckpointError: ``sharded_not_pickled``.
        """
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


INDEXES_BEFORE_SHARDING: WeakSet[nn.Module] = WeakSet()
"""The indexes of collections of which there is a sharded form, which has indexes of its own."""


def sharded_collections(model: nn.Module) -> dict[str, ShardedCollection]:
    """The sharded collections of ``model``, by fully qualified name."""
    return collections_of(model, ShardedCollection)


def _asked_by_sharder(table: TableSpec) -> TableSpec:
    """The table of a sharder that lets tables send each different id once, unless the conversion was told otherwise."""
    if table.dedup.asked is not None or table.is_pooled:
        return table
    return replace(table, dedup=replace(table.dedup, asked=True))


def leave_to_collections(model: nn.Module) -> None:
    """Let a ``DistributedDataParallel`` around ``model``, or any part of it, leave sharded tables alone."""
    for parent in model.modules():
        ignored = {
            name
            for path, module in sharded_collections(parent).items()
            for name, _ in [*module.named_parameters(path), *module.named_buffers(path)]
        }
        if ignored:
            ignored.update(getattr(parent, "_ddp_params_and_buffers_to_ignore", ()))
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(parent, sorted(ignored))


def shard_collection(
    module: UnshardedCollection,
    plan: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None = None,
    *,
    fused_params: Mapping[str, Any] | None = None,
    host_group: torch.distributed.ProcessGroup | None = None,
    dense_as_torchrec: bool = False,
    dedup: bool = False,
    wires: Wires | None = None,
    path: str = "",
) -> ShardedCollection:
    """Shard a converted collection; every rank calls it with the same plan.

    Weights, ids and the state of fused optimizers stay: each rank keeps its shards of what its own ``module`` holds,
    and replicas of data-parallel tables become those of rank 0. ``module`` itself is not changed.

    Args:
        module: the collection; tables on meta are allocated on ``device`` and initialised.
        plan: the sharding of each table.
        env: an environment with a process group.
        device: device of the shards; None for that of the tables (the CPU if they are on ``meta``).
        fused_params: settings of fused optimizers that the tables do not have themselves, in the format of TorchRec's
            sharders. On compute kernel ``fused`` a table always has a fused optimizer: FBGEMM's SGD if nothing else.
        dense_as_torchrec: on compute kernel ``dense`` a table has no fused optimizer, whatever is attached to it.
        dedup: whether tables whose rows are not pooled send each different id once, unless the conversion was told
            otherwise. Also if ``torchrec.distributed.embedding.set_ec_index_dedup(True)`` was called.
        wires: in which precision rows and gradients are sent; None for that of the rows.
        host_group: the process group for ids, if it is not that of ``env``.
        path: fully qualified name of the collection in the model.

    Raises:
        ConversionError: the same as ``read_plan``; ``traced_graph``, ``tied_tables``, ``ranks_have_different_plans``,
            ``ranks_have_different_settings``, ``unsupported_fused_param``, ``no_process_group``; an optimizer in
            backward that has no fused form.
    """
    path = path or module.collection
    if module.graph_is_inlined:
        raise ConversionError(
            "the graph of a whole model calls what is inside the collection, and would go on with unsharded tables.",
            reason="traced_graph",
            module_path=path,
            what_to_do="shard the model first, as recfx.convert(model, sample, plan=..., whole_graph=True) does.",
        )
    for table, others in module.store.shared_weights.items():
        raise ConversionError(
            f"the weight of table {table!r} is also {', '.join(others)}, and shards do not share any: from then on, "
            "each would be trained by itself.",
            reason="tied_tables",
            module_path=path,
            what_to_do="use one table for both features, or do without sharding.",
        )
    tables = module.tables
    if dedup or get_ec_index_dedup():
        tables = tuple(map(_asked_by_sharder, tables))

    def read() -> CollectionSharding:
        of_tables = read_plan(tables, plan, env.rank, env.world_size, path)
        check_optimizers(module)
        return of_tables

    wires = wires or {}
    options: dict[str, Any] = {"dense_as_torchrec": dense_as_torchrec, "host_group": host_group is not None}
    options |= {f"qcomm_codecs_registry[{name!r}]": str(wire) for name, wire in wires.items()}
    sharding = agreed_sharding(
        env.process_group, lambda: settings_of(module, tables, options, fused_params), read, path
    )
    groups = DistGroups.of(env, sharding.local_size, host_group)
    if sent_on(groups.ids).type not in FBGEMM_PERMUTES_ON:
        tables = tuple(replace(table, dedup=replace(table.dedup, on_device=True)) for table in tables)
        sharding = read_plan(tables, plan, env.rank, env.world_size, path)
    sharding = replace(sharding, wires=wires)
    settings = optimizer_settings(module, sharding, fused_params, dense_as_torchrec=dense_as_torchrec)
    sharded = SHARDED[kind_of(module)](module, sharding, groups, device, settings)
    for index in module.hash_indexes.values():
        INDEXES_BEFORE_SHARDING.add(index)
    return sharded
