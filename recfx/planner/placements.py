"""Moves plans that were made for devices that this host lacks to devices that it has."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from recfx.collections.sharding.types import rank_of
from recfx.errors import ConversionError, type_of

PRIVATE = "privateuseone"


def replace_placements(plan: ShardingPlan, device_type: str, local_world_size: int | None = None) -> ShardingPlan:
    """``plan`` with every shard on a device of ``device_type``: ``rank:3/cuda:3`` becomes ``rank:3/npu:3``.

    Ranks, sizes, kernels and everything else stay the same. Without torch_npu, torch does not know the name ``npu``;
    shards are then on ``privateuseone``, the name of the same device until torch_npu renames it.

    Args:
        plan: any TorchRec plan; it is not changed.
        device_type: ``"npu"``, ``"cpu"``, ``"cuda"``, ...
        local_world_size: number of devices per host; a rank's device index is its rank modulo this number. Default: the
            shard keeps its index.

    Returns:
        A new plan. Parts of it that do not mention devices are the same objects.

    Raises:
        ConversionError: ``unknown_device``, ``unsupported_placement``.
    """
    device = _known(device_type)
    modules = dict(plan.plan)
    for path, tables in plan.plan.items():
        if isinstance(tables, EmbeddingModuleShardingPlan):
            moved = modules[path] = EmbeddingModuleShardingPlan()
            for table, parameter in tables.items():
                moved[table] = _on_device(parameter, device, local_world_size, f"{path}.{table}" if path else table)
    return ShardingPlan(modules)


def _on_device(parameter: ParameterSharding, device: str, local_world_size: int | None, path: str) -> ParameterSharding:
    spec = parameter.sharding_spec
    if spec is None:  # data parallel: the table is on every rank
        return replace(parameter)
    if not isinstance(spec, EnumerableShardingSpec):
        raise _unsupported(f"its sharding_spec is {type_of(spec)}", path)
    shards = [
        ShardMetadata(
            shard_offsets=list(shard.shard_offsets),
            shard_sizes=list(shard.shard_sizes),
            placement=_device_named(_placement(shard, device, local_world_size, path)),
        )
        for shard in spec.shards
    ]
    return replace(parameter, sharding_spec=EnumerableShardingSpec(shards))


def _placement(shard: ShardMetadata, device: str, local_world_size: int | None, path: str) -> str:
    rank = rank_of(shard)
    if rank is not None and device == "cpu":
        return f"rank:{rank}/cpu"
    if rank is not None and local_world_size is not None:
        return f"rank:{rank}/{device}:{rank % local_world_size}"
    if rank is None or (index := shard.placement.device().index) is None:  # type: ignore[union-attr]
        raise _unsupported(f"a shard is placed on {shard.placement}", path)
    return f"rank:{rank}/{device}:{index}"


@lru_cache(maxsize=4096)
def _device_named(placement: str) -> _remote_device:
    """What ``ShardMetadata`` would make of it, for each of a thousand tables on each of a thousand ranks."""
    return _remote_device(placement)


def _unsupported(what: str, path: str) -> ConversionError:
    return ConversionError(
        f"{what}.",
        reason="unsupported_placement",
        module_path=path,
        what_to_do="place shards on rank:<rank>/<device>:<index>, as TorchRec's planners do, or pass local_world_size.",
    )


def _known(device_type: str) -> str:
    """The name by which torch knows the device type."""
    try:
        torch.device(device_type)
    except RuntimeError as error:
        if device_type == "npu" and torch._C._get_privateuse1_backend_name() == PRIVATE:
            return PRIVATE
        raise ConversionError(
            f"torch knows no device type {device_type!r}.",
            reason="unknown_device",
            what_to_do="use npu, cuda or cpu, or import the package that provides the device.",
        ) from error
    return device_type
