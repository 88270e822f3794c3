"""``recfx.sharders``: ours for what was converted, TorchRec's for everything else in the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingEnv
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from recfx.collection import HashEmbeddingBagCollection
from recfx.errors import ConversionError
from recfx.sharding.sharder import HashEmbeddingBagCollectionSharder
from recfx.subclasses import classes_made_for


def sharders(
    host_env: ShardingEnv | None = None, fused_params: Mapping[str, Any] | None = None
) -> list[ModuleSharder[nn.Module]]:
    """Sharders for TorchRec's planners and ``DistributedModelParallel``. Call it after ``recfx.convert``.

    TorchRec looks sharders up by a module's exact class. A converted subclass of ``EmbeddingBagCollection`` has a class
    that the conversion made, so there is one sharder for each class made so far.

    Args:
        host_env: environment over a gloo group on which ids travel, where the model's own group is hccl or nccl.
        fused_params: optimizer of the tables that have none in backward, as TorchRec takes it: ``optimizer``,
            ``learning_rate``, ``eps``, ``beta1``, ``beta2``, ``weight_decay``. Collections that were not converted get
            it too.

    Returns:
        Ours first, then ``torchrec.distributed.sharding_plan.get_default_sharders()``.

    Raises:
        ConversionError: ``unsupported_fused_param``, ``host_env_without_group``.
    """
    classes: list[type[nn.Module]] = [HashEmbeddingBagCollection, *classes_made_for(HashEmbeddingBagCollection)]
    ours = [
        HashEmbeddingBagCollectionSharder(fused_params, host_env=host_env, module_type=module_type)
        for module_type in classes
    ]
    return [*ours, *torchrec_sharders(fused_params)]


def torchrec_sharders(fused_params: Mapping[str, Any] | None = None) -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders, with ``fused_params`` for those that train."""

    def params() -> dict[str, Any] | None:
        return dict(fused_params) if fused_params else None  # TorchRec keeps the dict and may write into it

    replaced: dict[type[Any], ModuleSharder[nn.Module]] = {
        EmbeddingBagCollectionSharder: EmbeddingBagCollectionSharder(params()),
        EmbeddingCollectionSharder: EmbeddingCollectionSharder(params()),
        FeatureProcessedEmbeddingBagCollectionSharder: PlainFeatureProcessedSharder(
            EmbeddingBagCollectionSharder(params())
        ),
    }
    return [replaced.get(type(sharder), sharder) for sharder in get_default_sharders()]


class PlainFeatureProcessedSharder(FeatureProcessedEmbeddingBagCollectionSharder):
    """TorchRec's sharder of feature-processed collections, which would drop the index of a converted one inside."""

    def shardable_parameters(self, module: FeatureProcessedEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """As TorchRec's.

        Raises:
            ConversionError: ``feature_processed``.
        """
        if isinstance(module._embedding_bag_collection, HashEmbeddingBagCollection):
            raise ConversionError(
                "a converted collection inside FeatureProcessedEmbeddingBagCollection cannot be sharded.",
                reason="feature_processed",
                module_path=module._embedding_bag_collection.collection,
                what_to_do="plan with recfx.plan: it shards the collection inside, after the features were processed.",
            )
        parameters: dict[str, nn.Parameter] = super().shardable_parameters(module)
        return parameters
