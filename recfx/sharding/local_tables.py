"""What a rank keeps of a collection: its shards' rows, indexes and optimizers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.fused import EmptyFusedOptimizer

from recfx.collection import HashEmbeddingBagCollection
from recfx.errors import ConversionError
from recfx.hashing import HashIndex
from recfx.hashing.slicing import slice_state
from recfx.nodes import TableStore
from recfx.sharding.fused_params import fused_optimizer_from_params
from recfx.sharding.shards import CollectionSharding, Shard, ShardedTable
from recfx.training.fused_optimizer import FusedOptimizer


class LocalTables(NamedTuple):
    """The modules of one rank's shards, by shard name."""

    bags: nn.ModuleDict
    indexes: nn.ModuleDict
    store: TableStore


def make_local_tables(
    module: HashEmbeddingBagCollection,
    sharding: CollectionSharding,
    group: dist.ProcessGroup,
    device: torch.device | None,
    fused_params: Mapping[str, Any] | None,
) -> LocalTables:
    """Cut this rank's shards out of ``module``, which stays as it is."""
    init_fns = {config.name: config.init_fn for config in module.embedding_bag_configs()}
    bags, indexes = nn.ModuleDict(), nn.ModuleDict()
    local = sharding.local()
    store = TableStore(bags, indexes, {}, {shard.name: init_fns[shard.table.name] for shard in local})
    fused = module.fused_optimizers()
    _check_optimizers(module)
    for shard in local:
        sharded = sharding.named(shard.table.name)
        weight = module.weight(shard.table.name)
        bags[shard.name] = _bag(shard, _rows(shard, weight, init_fns[shard.table.name], device), weight.requires_grad)
        if sharded.is_replicated:
            dist.broadcast(store.weight(shard.name).data, dist.get_global_rank(group, 0), group=group)
        if shard.table.has_index:
            indexes[shard.name] = _index(shard, module, sharded.is_replicated, group)
        optimizer = _optimizer(fused.get(shard.table.name), shard, sharded, fused_params)
        if optimizer is not None:
            store.optimizers[shard.name] = optimizer
            # TorchRec's mark, for in_backward_optimizer_filter: no other optimizer may take this parameter.
            parameter: Any = store.weight(shard.name)
            parameter._in_backward_optimizers = [EmptyFusedOptimizer()]
    return LocalTables(bags, indexes, store)


def _rows(shard: Shard, weight: torch.Tensor, init_fn: Any, device: torch.device | None) -> torch.Tensor:
    (first_row, end_row), (first_column, end_column) = shard.rows, shard.columns
    if not weight.is_meta:
        part = weight.detach()[first_row:end_row, first_column:end_column]
        return part.to(device or weight.device).clone(memory_format=torch.contiguous_format)
    made = torch.empty(end_row - first_row, end_column - first_column, dtype=weight.dtype, device=device or "cpu")
    if init_fn is not None:
        init_fn(made)
    return made


def _index(shard: Shard, module: HashEmbeddingBagCollection, replicated: bool, group: dist.ProcessGroup) -> HashIndex:
    """The shard's part of the table's index, with the ids that it holds."""
    config, (first, end) = shard.table.hashing, shard.rows
    assert config is not None
    whole = module.index(shard.table.name)
    index = HashIndex(config.rows, config=config, name=shard.table.name, device="cpu", row_begin=first, row_end=end)
    if not whole.slots.is_meta:
        state = slice_state(whole.state_dict(), first, end)
        if replicated:
            for name in sorted(state):
                state[name] = state[name].clone()
                dist.broadcast(state[name], dist.get_global_rank(group, 0), group=group)
        index.load_state_dict(state)
    return index


def _bag(shard: Shard, rows: torch.Tensor, requires_grad: bool) -> nn.EmbeddingBag:
    bag = nn.EmbeddingBag(
        rows.shape[0], rows.shape[1], mode=shard.table.pooling.lower(), _weight=rows, include_last_offset=True
    )
    return bag.requires_grad_(requires_grad)


def _optimizer(
    fused: FusedOptimizer | None, shard: Shard, sharded: ShardedTable, fused_params: Mapping[str, Any] | None
) -> FusedOptimizer | None:
    """The table's own optimizer with this shard's part of its state; the settings stay the same dict."""
    if fused is not None:
        state = {name: _state_part(value, shard) for name, value in fused.state.items()}
        return FusedOptimizer(fused.kind, fused.group, state)
    # TorchRec's planner knows data-parallel tables with dense kernels alone.
    takes_params = sharded.compute_kernel == "fused" or sharded.is_replicated
    return fused_optimizer_from_params(fused_params) if fused_params and takes_params else None


def _check_optimizers(module: HashEmbeddingBagCollection) -> None:
    """An optimizer in backward without a fused form would stay behind on the whole table."""
    for table, why in module.not_fused.items():
        raise ConversionError(
            f"the optimizer in backward of table {table!r} cannot be sharded: {why.message}",
            reason=why.reason,
            module_path=module.collection,
            what_to_do=why.what_to_do,
        )


def _state_part(value: Any, shard: Shard) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value.clone() if isinstance(value, torch.Tensor) else value
    (first_row, end_row), (first_column, end_column) = shard.rows, shard.columns
    if value.shape[1] == shard.table.embedding_dim and math.prod(value.shape[1:]) > 1:
        value = value[:, first_column:end_column]
    return value[first_row:end_row].clone(memory_format=torch.contiguous_format)
