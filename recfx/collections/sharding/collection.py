"""``ShardedCollection``: a TorchRec ``ShardedModule`` that owns a graph of explicit nodes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer

from recfx.collections.collection import UnshardedCollection
from recfx.collections.compile_graph import compile_graph, context_of, refuse_raw_ids
from recfx.collections.converted_classes import converted_class
from recfx.collections.converted_collection import collections_of
from recfx.collections.kinds import POOLED, CollectionKind, kind_of
from recfx.collections.pooled_collection import PooledCollection
from recfx.collections.sharding.batch_steps import BatchSteps
from recfx.collections.sharding.late_backwards import LateBackwards
from recfx.collections.sharding.load_state import LocalState, drop_shard_names, load_local_state
from recfx.collections.sharding.local_tables import LocalTables
from recfx.collections.sharding.optimizer import ShardedFusedOptimizer
from recfx.collections.sharding.refused_hooks import RefusedHooks
from recfx.collections.sharding.state import save_sharded_state
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.shards import CollectionSharding
from recfx.ir.snapshot import PASSES_KEY
from recfx.lowering.targets import TargetsHere
from recfx.runtime.dist_groups import DistGroups
from recfx.runtime.runtime import Runtime


class ShardedCollection(BatchSteps, RefusedHooks, FusedOptimizerModule):
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
        local: LocalTables,
    ) -> None:
        super().__init__()
        self.take_tables(unsharded, sharding, groups, local)
        evicting = [each.table.name for each in sharding.tables if each.table.evicts]
        late_backwards = LateBackwards(self.collection, groups.pooled, evicting, self._store.in_flight)
        is_hashed = any(each.table.has_index for each in sharding.tables)
        self._runtime = Runtime(self._store, groups, late_backwards if is_hashed else None)
        context = context_of(self.collection, self.tables, self._is_weighted, self._runtime, self.source, sharding)
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
        return ShardedFusedOptimizer(
            self.sharding, self._store, self.fused, self.groups.pooled, self._row_moves, kind_of(self)
        )

    def check_state(self, saved: Mapping[str, Any], prefix: str) -> None:
        """Check whether this rank could load its part of a state; see the base class for arguments and errors."""
        LocalState(self, saved, prefix)

    def own_names(self) -> frozenset[str]:
        """All attributes: what users put on a collection stays with the unsharded one."""
        return frozenset(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedCollection:
        """A copy with its own tables that communicates in the same process groups, which cannot be copied."""
        memo |= {id(group): group for group in vars(self.groups).values()}
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate


class ShardedHashEmbeddingBagCollection(PooledCollection, ShardedCollection):
    """Pooled embeddings; ``forward`` returns a ``LazyAwaitable[KeyedTensor]``."""


SHARDED: dict[CollectionKind, type[ShardedCollection]] = {POOLED: ShardedHashEmbeddingBagCollection}
"""The class of sharded collections of each kind, one line per kind."""


def sharded_collections(model: nn.Module) -> dict[str, ShardedCollection]:
    """The sharded collections of ``model``, by fully qualified name."""
    return collections_of(model, ShardedCollection)
