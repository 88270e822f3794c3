"""Turns sharded collections back into standard ones; part of ``recfx.unconvert``."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import ShardedCollection, sharded_collections
from recfx.collections.sharding.gather import WholeTable, gather_tables
from recfx.kernels.index_buffers import is_taken
from recfx.optim.in_backward import attach_unfused


def without_model_parallel(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedModelParallel``, if it is inside one."""
    return get_unwrapped_module(model) if isinstance(model, DistributedModelParallel) else model


def gather_collections(model: nn.Module) -> dict[str, dict[str, WholeTable]]:
    """The whole tables of every sharded collection, by its name and theirs, on every rank. Collective."""
    return {path: gather_tables(module) for path, module in sharded_collections(model).items()}


def held_ids(table: WholeTable) -> tuple[Tensor, Tensor]:
    """The ids of a table and their rows, int64 ``[n]`` each, by row."""
    rows = torch.nonzero(is_taken(table.index["row_state"])).squeeze(1)
    return table.index["row_ids"][rows], rows


def unsharded_collection(module: ShardedCollection, tables: dict[str, WholeTable]) -> nn.Module:
    """An unsharded collection of whole tables on the CPU, their fused optimizers attached in dense form."""
    kind = kind_of(module)
    standard = kind.empty_like(module)
    holders: Any = kind.tables_of(standard)
    for name, table in tables.items():
        holders[name].weight = nn.Parameter(table.weight, requires_grad=table.requires_grad)
        if table.optimizer is not None:
            attach_unfused(holders[name].weight, table.optimizer)
    standard._device = torch.device("cpu")
    standard.train(module.training)
    return cast(nn.Module, standard)
