"""What TorchRec asks about a converted collection: which tables can be sharded, how, and the sharding itself.

``recfx.sharders`` lists these sharders, and TorchRec's own for everything else in a model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    QuantizedCommCodecs,
    ShardedModule,
    ShardingEnv,
)

from recfx.collections.collection import UnshardedCollection
from recfx.collections.copy_modules import carry_hooks
from recfx.collections.hash_collections import HashEmbeddingBagCollection, all_converted_classes
from recfx.collections.kinds import KINDS, kind_of
from recfx.collections.sharding.plan import KERNELS
from recfx.collections.sharding.shard import shard_collection
from recfx.collections.sharding.types import SHARDING_TYPES
from recfx.errors import ConversionError, type_of
from recfx.errors.argument_types import typed
from recfx.optim.fused_params import fused_optimizer_from_params
from recfx.runtime.dist_groups import wires_of

Sharders = list[ModuleSharder[nn.Module]]

_DEVICES = frozenset({"cpu", "cuda", "npu", "meta"})


@typed(ConversionError)
def sharders(
    host_env: ShardingEnv | None = None,
    fused_params: Mapping[str, Any] | None = None,
    qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
) -> Sharders:
    """Sharders for TorchRec's planners and ``DistributedModelParallel``, with everything that recfx can do.

    Without them, or with TorchRec's own sharders, converted collections are sharded as TorchRec would shard the
    standard ones; these add row-wise types on CPUs, ``host_env``, and fused optimizers of data-parallel tables.

    Example:
        >>> from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        >>> planner = EmbeddingShardingPlanner(topology=Topology(world_size=2, compute_device="cpu"))
        >>> plan = planner.plan(recfx.convert(Model()), recfx.sharders())  # as DistributedModelParallel does
        >>> list(plan.plan["ebc"])
        ['users']

    Args:
        host_env: environment over a gloo group that sends the ids, if the model's own group is hccl or nccl.
        fused_params: optimizer for the tables that have none in backward, in TorchRec's format: ``optimizer``,
            ``learning_rate``, ``eps``, ``beta1``, ``beta2``, ``weight_decay``. It also applies to collections that were
            not converted.
        qcomm_codecs_registry: in which precision ranks send rows and gradients, as TorchRec's
            ``get_qcomm_codecs_registry`` returns it: FP16 or BF16. It also applies to collections that were not
            converted.

    Returns:
        recfx's sharders, followed by ``torchrec.distributed.sharding_plan.get_default_sharders()``.

    Raises:
        ConversionError: ``unsupported_fused_param``, ``host_env_without_group``, ``quantized_communication``.
    """
    ours = [
        HashEmbeddingBagCollectionSharder(
            fused_params, host_env=host_env, module_type=module_type, qcomm_codecs_registry=qcomm_codecs_registry
        )
        for kind in KINDS
        for module_type in all_converted_classes(kind)
    ]
    return [*ours, *torchrec_sharders(fused_params, qcomm_codecs_registry)]


def torchrec_sharders(
    fused_params: Mapping[str, Any] | None = None, codecs: Mapping[str, QuantizedCommCodecs] | None = None
) -> Sharders:
    """TorchRec's default sharders, with ``fused_params`` and ``codecs`` for those that train."""
    kinds: tuple[Any, ...] = (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder)
    replaced: dict[Any, Any] = {kind: kind(_copied(fused_params), _copied(codecs)) for kind in kinds}
    bags = EmbeddingBagCollectionSharder(_copied(fused_params), _copied(codecs))
    replaced[FeatureProcessedEmbeddingBagCollectionSharder] = FeatureProcessedEmbeddingBagCollectionSharder(bags)
    return [replaced.get(type(sharder), sharder) for sharder in stock_defaults()]


def stock_defaults() -> Sharders:
    """TorchRec's own default sharders, without recfx's."""
    return list(inspect.unwrap(sharding_plan.get_default_sharders)())


def planned_types() -> tuple[str, ...]:
    """The sharding types that TorchRec's planner can enumerate."""
    return tuple(sharding_type.name for sharding_type in SHARDING_TYPES.values() if sharding_type.is_planned)


class HashEmbeddingBagCollectionSharder(BaseEmbeddingSharder[UnshardedCollection]):
    """Sharder of converted collections, pooled or not, for TorchRec's planners and ``DistributedModelParallel``.

    Args:
        fused_params, host_env, qcomm_codecs_registry: as for :func:`sharders`.
        module_type: class of the collections; TorchRec looks sharders up by it, and a converted subclass has its own.
        stock: TorchRec's sharder that would shard the standard collections; instead of all others but ``module_type``.
            On kernel ``dense``, a table is then left to the script's ordinary optimizer, whatever is attached to it, so
            a plain TorchRec script trains the same model.

    Raises:
        ConversionError: ``unsupported_fused_param``, ``host_env_without_group``, ``quantized_communication``.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        *,
        host_env: ShardingEnv | None = None,
        module_type: type[nn.Module] = HashEmbeddingBagCollection,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        stock: BaseEmbeddingSharder[Any] | None = None,
    ) -> None:
        self.stock, self._module_type = stock, module_type
        host_group = None if host_env is None else host_env.process_group
        if stock is not None:
            dedup = isinstance(stock, EmbeddingCollectionSharder) and stock._use_index_dedup
            fused_params, qcomm_codecs_registry = stock.fused_params, stock.qcomm_codecs_registry
            self._options: dict[str, Any] = {"dense_as_torchrec": True, "dedup": dedup}
        else:
            if fused_params:
                fused_optimizer_from_params(fused_params)  # raise here rather than on every rank in the middle
            self._options = {"host_group": host_group}
        if host_env is not None and host_group is None:
            raise ConversionError(
                "host_env has no process group.",
                reason="host_env_without_group",
                what_to_do="make it with ShardingEnv.from_process_group(dist.new_group(backend='gloo')).",
            )
        super().__init__(fused_params=_copied(fused_params), qcomm_codecs_registry=_copied(qcomm_codecs_registry))
        self._options["wires"] = wires_of(qcomm_codecs_registry)

    @property
    def module_type(self) -> type[nn.Module]:
        return self._module_type

    def for_class(self, module_type: type[nn.Module]) -> HashEmbeddingBagCollectionSharder:
        same = copy.copy(self)
        same._module_type = module_type
        return same

    def shard(
        self,
        module: nn.Module,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedModule[Any, Any, Any, Any]:
        """Shard one converted collection; ``params`` says by table name how, ``module_fqn`` is its path."""
        path = module_fqn or ""
        if not isinstance(module, UnshardedCollection):
            raise ConversionError(
                f"{type_of(module)} is not a converted collection.",
                reason="not_converted",
                module_path=path,
                what_to_do="convert the model with recfx.convert first.",
            )
        sharded: ShardedModule[Any, Any, Any, Any] = shard_collection(
            module, params, env, device, fused_params=self.fused_params, path=path, **self._options
        )
        carry_hooks(module, sharded, for_good=True)  # it takes the place of the module
        return sharded

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The ``[rows, dim]`` parameter of every table, by table name."""
        if self.stock is not None:
            return self.stock.shardable_parameters(module)
        tables: Any = kind_of(module).tables_of(module)
        return {table: holder.weight for table, holder in tables.items()}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All seven types, with row-wise ones also on CPUs (TorchRec's own sharder offers these only on CUDA)."""
        if self.stock is not None:
            return [name for name in self.stock.sharding_types(compute_device_type) if name in SHARDING_TYPES]
        return list(planned_types()) if compute_device_type in _DEVICES else []

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """``dense`` for data-parallel tables; otherwise ``fused`` and ``dense``, which stock planners refuse."""
        if self.stock is not None:
            kernels = self.stock.compute_kernels(sharding_type, compute_device_type)
            return [kernel for kernel in kernels if kernel in KERNELS]
        return list(SHARDING_TYPES[sharding_type].kernels)


def _copied(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """TorchRec keeps the dict that it is given, and may write into it."""
    return dict(given) if given else None
