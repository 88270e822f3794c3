"""What a rank has of a sharded collection before anything runs: its shards, and what it knows about all tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.fused import EmptyFusedOptimizer

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.optimizer_settings import OptimizerSettings
from recfx.collections.table_holder import hold
from recfx.errors import ConversionError, Diagnostic
from recfx.hashing import HashIndex
from recfx.hashing.slices import slice_state
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import Shard
from recfx.optim.attached import set_attached
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.runtime import TableStore
from recfx.runtime.dist_groups import DistGroups, replicate
from recfx.runtime.transfers import crosses


def cut_tables(
    module: UnshardedCollection,
    sharding: CollectionSharding,
    group: dist.ProcessGroup,
    device: torch.device | None,
    fused: Mapping[str, FusedOptimizer],
) -> TableStore:
    """The weights, indexes and fused optimizers of this rank's shards, by name; replicas become those of rank 0.

    ``module`` stays as it is. Shards of a table share the ``group`` of its optimizer but not the state. Collective.
    """
    kind = kind_of(module)
    init_fns = {config.name: config.init_fn for config in kind.configs_of(module)}
    bags, indexes = nn.ModuleDict(), nn.ModuleDict()
    local = sharding.local()
    store = TableStore(
        bags, indexes, {}, {shard.name: init_fns[shard.table.name] for shard in local}, _device(module, device)
    )
    store.in_flight.depth = module.batches_in_flight
    for table in module.hash_indexes:
        module.index(table).refresh()  # before weights are copied, because it may initialise some
    states = module.take_over_optimizers()
    leaders: dict[tuple[str, tuple[int, int]], HashIndex] = {}
    for shard in local:
        sharded = sharding.named(shard.table.name)
        weight = module.weight(shard.table.name)
        rows = _rows(shard, weight, init_fns[shard.table.name], device)
        bags[shard.name] = kind.table_around(rows, shard.table.pooling).requires_grad_(weight.requires_grad)
        if sharded.is_replicated:
            replicate(store.weight(shard.name), group)
        if shard.table.has_index:
            index = indexes[shard.name] = _index(shard, module, sharded.is_replicated, group)
            leader = leaders.setdefault((shard.table.name, shard.rows), index)
            if leader is not index:
                index.follow(leader)
        if shard.table.name in fused:
            settings, old = fused[shard.table.name], states.get(shard.table.name)
            state = {} if old is None else {name: _state_part(value, shard) for name, value in old.state.items()}
            optimizer = store.optimizers[shard.name] = FusedOptimizer(
                settings.rule, settings.group, state, shard=kind.weight_name(module.collection, shard.table.name)
            )
            if sharded.is_replicated:
                optimizer.prepare(store.weight(shard.name))
                for name in optimizer.rule.saved_states.values():
                    replicate(optimizer.state[name], group)
            # TorchRec's in_backward_optimizer_filter looks for this attribute.
            set_attached(store.weight(shard.name), [EmptyFusedOptimizer()])
    hold(bags)
    return store


def _device(module: UnshardedCollection, device: torch.device | None) -> torch.device:
    chosen = device or next(
        (weight.device for weight in kind_of(module).tables_of(module).parameters()), torch.device("cpu")
    )
    return torch.device("cpu") if chosen.type == "meta" else chosen


def _rows(shard: Shard, weight: torch.Tensor, init_fn: Any, device: torch.device | None) -> torch.Tensor:
    if not weight.is_meta:
        return shard.of(weight.detach()).to(device or weight.device, copy=True, memory_format=torch.contiguous_format)
    rows = torch.empty(shard.num_rows, shard.num_columns, dtype=weight.dtype, device=device or "cpu")
    init_fn(rows)
    return rows


def _index(shard: Shard, module: UnshardedCollection, replicated: bool, group: dist.ProcessGroup) -> HashIndex:
    """The shard's part of the table's index, with the ids that it holds."""
    config, (first, end) = shard.table.hashing, shard.rows
    assert config is not None
    whole = module.index(shard.table.name)
    index = HashIndex(config.rows, config=config, name=shard.table.name, device="cpu", row_begin=first, row_end=end)
    if not whole.slot_groups.is_meta:
        state = slice_state(config, whole.state_dict(), first, end)
        if replicated:
            for name in sorted(state):
                state[name] = state[name].clone()
                replicate(state[name], group)
        index.load_state_dict(state)
    return index


def _state_part(value: Any, shard: Shard) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value.clone() if isinstance(value, torch.Tensor) else value
    part = shard.of(value) if value.shape[1] == shard.table.embedding_dim else value[slice(*shard.rows)]
    return part.clone(memory_format=torch.contiguous_format)


class ShardedTables(ConvertedCollection):
    """The tables of a sharded collection as one rank has them; base of ``ShardedCollection``.

    Attributes:
        sharding: which shards are where.
        groups: the process groups of ids and of pooled rows.
        fused: kind and settings of each table's fused optimizer, by table name.
        dtypes: dtypes of the tables' weights, by table name.
        taken: choices about the tables' optimizers that the user did not spell out, by table name.
    """

    is_sharded = True

    sharding: CollectionSharding
    groups: DistGroups
    fused: dict[str, FusedOptimizer]
    dtypes: dict[str, torch.dtype]
    taken: dict[str, tuple[Diagnostic, ...]]
    _made_on: torch.device

    def take_tables(
        self,
        unsharded: UnshardedCollection,
        sharding: CollectionSharding,
        groups: DistGroups,
        device: torch.device | None,
        settings: OptimizerSettings,
    ) -> None:
        """Become the sharded form of ``unsharded``, with this rank's part of its tables. Collective."""
        self.collection, self.backend, self.source = unsharded.collection, unsharded.backend, unsharded.source
        self.requested, self.calls, self.passes = dict(unsharded.requested), unsharded.calls, unsharded.passes
        kind = kind_of(self)
        setattr(self, kind.configs_attribute, kind.configs_of(unsharded))
        self.__dict__.update(kind.settings_of(unsharded))
        self._store = cut_tables(unsharded, sharding, groups.pooled, device, settings.fused)
        setattr(self, kind.tables, self._store.bags)
        self._is_weighted = unsharded.is_weighted()
        self.tables = tuple(sharded.table for sharded in sharding.tables)
        self.sharding, self.groups = sharding, groups
        self.not_fused = dict(unsharded.not_fused)
        self.hash_indexes = self._store.indexes
        self.fused, self.taken = settings.fused, settings.taken
        self.dtypes = {table.name: unsharded.weight(table.name).dtype for table in unsharded.tables}
        self._row_moves = {}
        self._made_on = self._store.device

    def refuse_moved(self) -> None:
        """Refuse to run after the tables were moved between the host and another device.

        Not in ``to()`` itself, because a model that stops halfway through it would be on two devices.

        Raises:
            ConversionError: ``sharded_tables_moved``.
        """
        device, host = self._store.device, torch.device("cpu")
        if crosses(device, host) == crosses(self._made_on, host):
            return
        raise ConversionError(
            f"the collection was sharded with its tables on {self._made_on}, but they have been moved to {device}; its "
            f"process groups, and its copies of ids between the host and a device, are for {self._made_on}.",
            reason="sharded_tables_moved",
            module_path=self.collection,
            what_to_do=f"move the model back to {self._made_on}; or unconvert it, move it to {device}, and shard it "
            "there, in process groups of that device.",
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.groups.pooled

    def prepare_to_save(self) -> None:
        """Check this rank's indexes, and make the optimizer state that is missing."""
        for shard in self.sharding.local():
            if shard.table.has_index:
                self._store.index(shard.name).refresh()
            if shard.name in self._store.optimizers:
                self._store.optimizers[shard.name].prepare(self._store.weight(shard.name))
