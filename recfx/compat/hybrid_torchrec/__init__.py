"""The names of Rec SDK Torch's ``hybrid_torchrec``: its quick start runs once the import lines are changed.

Submodules have the same paths: put ``recfx.compat.`` in front of every ``hybrid_torchrec`` in an import. Rec SDK Torch
patches what TorchRec says of devices; recfx patches other functions (``recfx/README.md`` lists them) and leaves devices
alone, so what knows the device ``npu`` is here: ``Topology``, with its ``EmbeddingShardingPlanner``.

What Rec SDK Torch refuses because it has no kernel for it, but works here (all sharding types, any dim and data type,
ids of all 64 bits), is not refused. Configs have no ``hashing``: raw ids are spread over all ``num_embeddings`` rows.
Nothing in here has run on an NPU.
"""

from recfx.compat.hybrid_torchrec.distributed.hybrid_train_pipeline import HybridTrainPipelineSparseDist
from recfx.compat.hybrid_torchrec.distributed.model_parallel import DistributedModelParallel
from recfx.compat.hybrid_torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from recfx.compat.hybrid_torchrec.distributed.sharding_plan import get_default_hybrid_sharders
from recfx.compat.hybrid_torchrec.modules.hash_embedding import HashEmbeddingCollection, HashEmbeddingConfig
from recfx.compat.hybrid_torchrec.modules.hash_embeddingbag import HashEmbeddingBagCollection, HashEmbeddingBagConfig

__all__ = [
    "DistributedModelParallel",
    "EmbeddingShardingPlanner",
    "HashEmbeddingBagCollection",
    "HashEmbeddingBagConfig",
    "HashEmbeddingCollection",
    "HashEmbeddingConfig",
    "HybridTrainPipelineSparseDist",
    "Topology",
    "get_default_hybrid_sharders",
]


def __dir__() -> list[str]:
    return __all__
