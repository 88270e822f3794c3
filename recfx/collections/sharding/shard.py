"""``shard_collection``: a converted collection becomes a sharded one, on every rank."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import get_ec_index_dedup
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.optim.fused import EmptyFusedOptimizer

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import SHARDED, ShardedCollection, sharded_collections
from recfx.collections.sharding.plan import agreed_sharding, read_plan
from recfx.collections.sharding.settings import check_optimizers, optimizer_settings, settings_of
from recfx.collections.table_holder import hold
from recfx.errors import ConversionError
from recfx.hashing import HashIndex
from recfx.hashing.slices import slice_state
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import Shard
from recfx.ir.ways_back import Wires
from recfx.optim.attached import set_attached
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.runtime.bags import FBGEMM_PERMUTES_ON
from recfx.runtime.dist_groups import DistGroups, replicate, sent_on
from recfx.runtime.table_store import TableStore

INDEXES_BEFORE_SHARDING: WeakSet[nn.Module] = WeakSet()
"""The indexes of collections of which there is a sharded form, which has indexes of its own."""


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
    module: UnshardedCollection, plan: Mapping[str, ParameterSharding], env: ShardingEnv,
    device: torch.device | None = None, *, fused_params: Mapping[str, Any] | None = None,
    host_group: torch.distributed.ProcessGroup | None = None, dense_as_torchrec: bool = False, dedup: bool = False,
    wires: Wires | None = None, path: str = "",
) -> ShardedCollection:  # fmt: skip
    """Shard a converted collection; every rank calls it with the same plan.

    Weights, ids and the state of fused optimizers stay: each rank keeps its shards of what its own ``module`` holds,
    and replicas of data-parallel tables become those of rank 0. ``module`` itself is not changed; its tables on meta
    are allocated on ``device`` and initialised. For ``fused_params`` and ``dense_as_torchrec``, see
    ``optimizer_settings``.

    Args:
        device: device of the shards; None for that of the tables (the CPU if they are on ``meta``).
        dedup: whether tables whose rows are not pooled send each different id once, unless the conversion was told
            otherwise. Also if ``torchrec.distributed.embedding.set_ec_index_dedup(True)`` was called.
        wires: in which precision rows and gradients are sent; None for that of the rows.
        host_group: the process group for ids, if it is not that of ``env``.
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
        tables = tuple(
            table
            if table.is_pooled or table.dedup.asked is not None  # the conversion was told otherwise
            else replace(table, dedup=replace(table.dedup, asked=True))
            for table in tables
        )

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
    store = cut_tables(module, sharding, groups.pooled, device, settings.fused)
    sharded = SHARDED[kind_of(module)](module, sharding, groups, store, settings)
    for index in module.hash_indexes.values():
        INDEXES_BEFORE_SHARDING.add(index)
    return sharded


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
    states = module.fused_optimizers()
    leaders: dict[tuple[str, tuple[int, int]], HashIndex] = {}
    for shard in local:
        sharded = sharding.named(shard.table.name)
        weight = module.weight(shard.table.name)
        if weight.is_meta:
            rows = torch.empty(shard.num_rows, shard.num_columns, dtype=weight.dtype, device=device or "cpu")
            init_fns[shard.table.name](rows)
        else:
            place = device or weight.device
            rows = shard.of(weight.detach()).to(place, copy=True, memory_format=torch.contiguous_format)
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
    chosen = device or next(weight.device for weight in kind_of(module).tables_of(module).parameters())
    return torch.device("cpu") if chosen.type == "meta" else chosen


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
