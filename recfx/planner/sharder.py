"""What TorchRec asks about a converted collection: which tables can be sharded, how, and the sharding itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardedModule,
    ShardingEnv,
    ShardingType,
)

from recfx.errors import ConversionError
from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.sharding.fused_params import fused_optimizer_from_params
from recfx.sharding.plan import KERNELS
from recfx.sharding.shard_collection import shard_collection

DEVICES = frozenset({"cpu", "cuda", "npu", "meta"})
SHARDING_TYPES = (
    ShardingType.DATA_PARALLEL.value,
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
)


class HashEmbeddingBagCollectionSharder(BaseEmbeddingSharder[HashEmbeddingBagCollection]):
    """Sharder of converted collections, for TorchRec's planners and ``DistributedModelParallel``.

    Args:
        fused_params: TorchRec's dict, see :func:`recfx.sharding.fused_params.fused_optimizer_from_params`; used where
            a table has no optimizer in backward. None or empty: no fused optimizer.
        host_env: its process group carries the ids where the model's own group cannot (hccl, nccl): one of gloo.
        module_type: class of the collections; TorchRec looks sharders up by it, and a converted subclass has its own.

    Raises:
        ConversionError: ``unsupported_fused_param``, ``host_env_without_group``.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        *,
        host_env: ShardingEnv | None = None,
        module_type: type[nn.Module] = HashEmbeddingBagCollection,
    ) -> None:
        if fused_params:
            fused_optimizer_from_params(fused_params)  # raises here, not on every rank in the middle of sharding
        super().__init__(fused_params=dict(fused_params) if fused_params else None)
        self._module_type = module_type
        self._host_group = _group_of(host_env)

    @property
    def host_group(self) -> ProcessGroup | None:
        """What carries the ids, where it is not the model's own group."""
        return self._host_group

    @property
    def module_type(self) -> type[nn.Module]:
        """The class whose instances this shards; not its subclasses."""
        return self._module_type

    def for_class(self, module_type: type[nn.Module]) -> HashEmbeddingBagCollectionSharder:
        """The same for another class of converted collections."""
        same = copy.copy(self)
        same._module_type = module_type
        return same

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The ``[rows, dim]`` parameter of every table, by table name."""
        bags: Any = module.embedding_bags
        return {table: bag.weight for table, bag in bags.items()}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All seven, row-wise ones on a CPU too (TorchRec's own sharder offers those on CUDA alone)."""
        return list(SHARDING_TYPES) if compute_device_type in DEVICES else []

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """``dense`` for data parallel tables, as TorchRec's planner counts them; else ``fused`` and ``dense``.

        Stock planners never choose ``dense`` for other types: they refuse such a plan as invalid. Plans that were made
        otherwise may have it.
        """
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return [EmbeddingComputeKernel.DENSE.value]
        return [EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value]

    def shard(
        self,
        module: nn.Module,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedModule[Any, Any, Any, Any]:
        """Shard one converted collection.

        Args:
            module: the collection.
            params: how each table is sharded, by table name.
            env: whose process group the ranks of ``params`` are.
            device: where this rank's tables go.
            module_fqn: the collection's fully qualified name.

        Raises:
            ConversionError: ``not_converted``, and what sharding itself refuses.
        """
        sharded: ShardedModule[Any, Any, Any, Any] = shard_collection(
            _converted(module, module_fqn),
            params,
            env,
            device,
            fused_params=self.fused_params,
            host_group=self._host_group,
            path=module_fqn or "",
        )
        return sharded


class StockSharder(BaseEmbeddingSharder[HashEmbeddingBagCollection]):
    """Shards converted collections as a sharder of TorchRec's would shard the standard ones.

    It offers the types and kernels of that sharder that recfx has, and on kernel ``dense`` it leaves a table to the
    script's ordinary optimizer, whatever is attached to it: a script of TorchRec's calls trains the same model.

    Args:
        stock: TorchRec's, or a subclass of it.
        module_type: class of the collections.

    Raises:
        ConversionError: ``quantized_communication``.
    """

    def __init__(self, stock: EmbeddingBagCollectionSharder, module_type: type[nn.Module]) -> None:
        if stock.qcomm_codecs_registry:
            raise ConversionError(
                f"the {type(stock).__name__} quantizes what ranks send (qcomm_codecs_registry), which converted "
                "collections do not.",
                reason="quantized_communication",
                what_to_do="leave qcomm_codecs_registry out: rows travel in the tables' own precision then.",
            )
        super().__init__(fused_params=stock.fused_params)
        self._stock, self._module_type = stock, module_type

    @property
    def module_type(self) -> type[nn.Module]:
        """The class whose instances this shards; not its subclasses."""
        return self._module_type

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """As the stock sharder says it."""
        parameters: dict[str, nn.Parameter] = self._stock.shardable_parameters(module)
        return parameters

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Those of the stock sharder."""
        return [kind for kind in self._stock.sharding_types(compute_device_type) if kind in SHARDING_TYPES]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Those of the stock sharder that there are."""
        return [
            kernel for kernel in self._stock.compute_kernels(sharding_type, compute_device_type) if kernel in KERNELS
        ]

    def shard(
        self,
        module: nn.Module,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedModule[Any, Any, Any, Any]:
        """As :meth:`HashEmbeddingBagCollectionSharder.shard`."""
        sharded: ShardedModule[Any, Any, Any, Any] = shard_collection(
            _converted(module, module_fqn),
            params,
            env,
            device,
            fused_params=self.fused_params,
            dense_as_torchrec=True,
            path=module_fqn or "",
        )
        return sharded


def _converted(module: nn.Module, path: str | None) -> HashEmbeddingBagCollection:
    if isinstance(module, HashEmbeddingBagCollection):
        return module
    raise ConversionError(
        f"a {type(module).__name__} is not a converted collection.",
        reason="not_converted",
        module_path=path or "",
        what_to_do="convert the model with recfx.convert first.",
    )


def _group_of(host_env: ShardingEnv | None) -> ProcessGroup | None:
    if host_env is None:
        return None
    group: ProcessGroup | None = host_env.process_group
    if group is None:
        raise ConversionError(
            "host_env has no process group.",
            reason="host_env_without_group",
            what_to_do="make it with ShardingEnv.from_process_group(dist.new_group(backend='gloo')).",
        )
    return group
