"""``recfx.sharders``: recfx's sharders for converted collections, TorchRec's for everything else in the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder, ShardingEnv

from recfx.collections.converted_classes import all_converted_classes
from recfx.collections.kinds import KINDS
from recfx.planner.sharder import HashEmbeddingBagCollectionSharder
from recfx.planner.torchrec_entry import stock_defaults


def sharders(
    host_env: ShardingEnv | None = None, fused_params: Mapping[str, Any] | None = None
) -> list[ModuleSharder[nn.Module]]:
    """Sharders for TorchRec's planners and ``DistributedModelParallel``, with everything that recfx can do.

    Without them, or with sharders of TorchRec's own, converted collections are sharded as TorchRec would shard the
    standard ones; these add row-wise types on CPUs, ``host_env``, and fused optimizers of data-parallel tables.

    TorchRec looks sharders up by a module's exact class. A converted subclass of ``EmbeddingBagCollection`` has a class
    that the conversion made, so there is one sharder per class made so far; those of classes that are made later are
    added when the list is used.

    Args:
        host_env: environment over a gloo group that sends the ids, if the model's own group is hccl or nccl.
        fused_params: optimizer for the tables that have none in backward, in TorchRec's format: ``optimizer``,
            ``learning_rate``, ``eps``, ``beta1``, ``beta2``, ``weight_decay``. It also applies to collections that were
            not converted.

    Returns:
        recfx's sharders, followed by ``torchrec.distributed.sharding_plan.get_default_sharders()``.

    Raises:
        ConversionError: ``unsupported_fused_param``, ``host_env_without_group``.
    """
    ours = [
        HashEmbeddingBagCollectionSharder(fused_params, host_env=host_env, module_type=module_type)
        for kind in KINDS
        for module_type in all_converted_classes(kind)
    ]
    return [*ours, *torchrec_sharders(fused_params)]


def torchrec_sharders(fused_params: Mapping[str, Any] | None = None) -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders, with ``fused_params`` for those that train."""

    def params() -> dict[str, Any] | None:
        return dict(fused_params) if fused_params else None  # TorchRec keeps the dict and may write into it

    replaced: dict[type[Any], ModuleSharder[nn.Module]] = {
        EmbeddingBagCollectionSharder: EmbeddingBagCollectionSharder(params()),
        EmbeddingCollectionSharder: EmbeddingCollectionSharder(params()),
        FeatureProcessedEmbeddingBagCollectionSharder: FeatureProcessedEmbeddingBagCollectionSharder(
            EmbeddingBagCollectionSharder(params())
        ),
    }
    return [replaced.get(type(sharder), sharder) for sharder in stock_defaults()]
