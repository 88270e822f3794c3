"""``shard_collection``: a converted collection becomes a sharded one, on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import get_ec_index_dedup
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import SHARDED, ShardedCollection, sharded_collections
from recfx.collections.sharding.optimizer_settings import check_optimizers, optimizer_settings
from recfx.collections.sharding.plan import agreed_sharding, read_plan
from recfx.collections.sharding.same_settings import settings_of
from recfx.errors import ConversionError
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import TableSpec
from recfx.ir.ways_back import Wires
from recfx.runtime.bags import FBGEMM_PERMUTES_ON
from recfx.runtime.dist_groups import DistGroups, sent_on

INDEXES_BEFORE_SHARDING: WeakSet[nn.Module] = WeakSet()
"""The indexes of collections of which there is a sharded form, which has indexes of its own."""


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
