"""Sharding plans as TorchRec makes them, and models on ``meta`` to make plans for."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingPlan

from tests.builders.collections import sequence_table, table


def plan_of_kinds(
    path: str, collection: nn.Module, kinds: Mapping[str, Any], world_size: int, local_size: int | None = None
) -> ShardingPlan:
    """A plan on CPUs for the collection at ``path``.

    Args:
        path: the fully qualified name of the collection.
        collection: a standard or a converted one.
        kinds: TorchRec's ``table_wise(rank=0)`` and the like, by name of the table.
        world_size: the number of ranks.
        local_size: how many of them are on a host; by default all, but no more than eight.
    """
    plan = construct_module_sharding_plan(
        collection, dict(kinds), local_size=local_size or min(world_size, 8), world_size=world_size, device_type="cpu"
    )
    return ShardingPlan({path: plan})


def model_of_tables(rows: Sequence[int], dim: int, *, is_pooled: bool = True) -> nn.Module:
    """The collection ``ebc`` on meta, with a table ``t0``, ``t1``, ... of the feature ``f0``, ... for each size."""
    make_collection, make = (EmbeddingBagCollection, table) if is_pooled else (EmbeddingCollection, sequence_table)
    tables = [make(f"t{number}", [f"f{number}"], rows=size, dim=dim) for number, size in enumerate(rows)]
    return nn.ModuleDict({"ebc": make_collection(tables, device=torch.device("meta"))})
